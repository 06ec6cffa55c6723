//! What the server's calls share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use exocell_cell::Layout;
use exocell_cell::images::Store;
use hyper::StatusCode;
use tokio::sync::oneshot;

use crate::admit::Defaults;
use crate::containers::{Container, Containers, Seen};
use crate::error::{ApiError, ApiResult};
use crate::events::{Event, Events};
use crate::exec::Execs;
use crate::live::Live;
use crate::session::Sessions;
use crate::shares::Shares;

/// The server: containers on disk, and what is known of them beyond that.
pub struct Server {
    pub containers: Containers,
    pub defaults: Defaults,
    pub events: Arc<Events>,
    pub execs: Execs,
    /// What clients of BuildKit's protocol answer on.
    pub sessions: Arc<Sessions>,
    /// Held while a name is given away.
    pub naming: tokio::sync::Mutex<()>,
    pub shares: Shares,
    lives: Mutex<HashMap<String, Arc<Live>>>,
}

impl Server {
    pub fn new(containers: Containers, defaults: Defaults) -> Self {
        Self {
            containers,
            defaults,
            events: Arc::default(),
            execs: Execs::default(),
            sessions: Arc::default(),
            naming: tokio::sync::Mutex::default(),
            shares: Shares::default(),
            lives: Mutex::default(),
        }
    }

    pub fn layout(&self) -> &Layout {
        self.containers.layout()
    }

    pub fn images(&self) -> ApiResult<Store> {
        Ok(Store::open(self.layout().images())?)
    }

    /// Runs what may block on a thread that may. There are many, but no end of them: what waits
    /// for a client, or for another who may take his time, is to have its own
    /// ([`Self::at_its_pace`]).
    pub async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let server = self.clone();
        let joined = tokio::task::spawn_blocking(move || work(&server)).await;
        joined.unwrap_or_else(|error| Err(ApiError::internal(format!("the call failed: {error}"))))
    }

    /// Runs `work` on a thread of its own, which whoever feeds it may hold for as long as he has
    /// a place.
    pub async fn at_its_pace<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let (sender, done) = oneshot::channel();
        self.begin(move |server| {
            // Its call may be over.
            let _ = sender.send(work(server));
        })?;
        done.await.unwrap_or_else(|_| Err(ApiError::internal("the call failed")))
    }

    /// Begins `work` on a thread of its own.
    ///
    /// # Errors
    /// The host has no more threads.
    pub fn begin(
        self: &Arc<Self>,
        work: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) -> ApiResult<()> {
        let server = self.clone();
        let thread = thread::Builder::new().name("docker-stream".to_owned());
        match thread.spawn(move || work(&server)) {
            Ok(_) => Ok(()),
            Err(error) => Err(ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("there is no thread for the call ({error}); try again later"),
            )),
        }
    }

    /// The container whose name, id or id prefix is `key`.
    pub async fn find(self: &Arc<Self>, key: &str) -> ApiResult<Seen> {
        let key = key.to_owned();
        self.blocking(move |server| server.containers.find(&key)).await
    }

    fn lives(&self) -> MutexGuard<'_, HashMap<String, Arc<Live>>> {
        self.lives.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is known of the life of container `id`.
    pub fn live(&self, id: &str) -> Arc<Live> {
        let mut lives = self.lives();
        lives.entry(id.to_owned()).or_insert_with(|| Arc::new(Live::new(id))).clone()
    }

    /// The container is gone: tells those who wait, and forgets it.
    pub fn bury(&self, id: &str) {
        self.bury_ended(id, None);
    }

    /// As [`Self::bury`], with the end of its program (see [`Live::removed`]).
    pub fn bury_ended(&self, id: &str, code: Option<u8>) {
        let live = self.lives().remove(id);
        if let Some(live) = live {
            live.removed(code);
        }
        self.execs.forget_container(id);
    }

    /// Tells what happened to a container.
    pub fn tell(&self, container: &Container, action: impl Into<String>, more: &[(&str, String)]) {
        let own =
            [("image", container.config.image.clone()), ("name", container.name().to_owned())];
        let labels = container.config.labels.clone().into_iter();
        let own = own.iter().chain(more).map(|(name, value)| ((*name).to_owned(), value.clone()));
        let event = Event::new("container", action, container.id(), labels.chain(own).collect());
        self.events.tell(event.of_container(&container.made_by));
    }
}
