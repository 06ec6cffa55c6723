//! What the calls share: the sandboxes that are there, and their beginnings and ends.

use std::collections::HashMap;
use std::os::unix::net::UnixStream as BlockingStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use exocell_cell::agent::{Kind, Reply};
use exocell_cell::control::{Client, ControlRequest};
use exocell_cell::logging::tracing::{info, warn};
use exocell_cell::signal::Signal;
use exocell_cell::{CellError, Layout, Record, State, Status, end, now_ms};
use exocell_docker::frames::read_frame;
use tokio::net::UnixStream;

use crate::blocking::blocking;
use crate::bounds::Bounds;
use crate::builds::Builds;
use crate::envd::programs;
use crate::error::{Problem, Result};
use crate::keys::Keys;
use crate::note::{Note, Notes, OnTimeout};
use crate::options::Options;
use crate::queue::Queue;
use crate::sandbox::{self, Sandbox, listened};
use crate::settled::Settled;
use crate::waiting::Pool;

/// Sandboxes that boot at once for each processor of the host; who comes then waits.
const BOOTS_OF_ONE: usize = 2;
const BOOTS_MAX: usize = 32;

/// Whose turn it is among requests that are alike.
type Turn = Weak<tokio::sync::Mutex<()>>;

/// See the module's head.
pub struct Server {
    pub options: Arc<Options>,
    pub bounds: Arc<Bounds>,
    pub keys: Keys,
    pub notes: Notes,
    pub builds: Arc<Builds>,
    pub queue: Arc<Queue>,
    pub pool: Pool<Arc<Sandbox>>,
    pub settled: Settled,
    /// Requests of clients that are being answered, by tenant and key.
    requests: Mutex<HashMap<(String, String), Turn>>,
    /// Sandboxes that are being started, by tenant.
    pub starting: Mutex<HashMap<String, usize>>,
    sandboxes: Mutex<HashMap<String, Arc<Sandbox>>>,
}

impl Server {
    pub fn new(
        options: Arc<Options>,
        keys: Keys,
        notes: Notes,
        builds: Builds,
        bounds: Arc<Bounds>,
    ) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        Self {
            options,
            bounds,
            keys,
            notes,
            builds: Arc::new(builds),
            queue: Queue::new((BOOTS_OF_ONE * processors).min(BOOTS_MAX)),
            pool: Pool::default(),
            settled: Settled::default(),
            requests: Mutex::default(),
            starting: Mutex::default(),
            sandboxes: Mutex::default(),
        }
    }

    pub fn layout(&self) -> &Layout {
        &self.options.layout
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Sandbox>>> {
        self.sandboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// To be held while a request is answered that a client may send twice.
    pub fn turn(&self, tenant: &str, key: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut all = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, turn| turn.strong_count() > 0);
        let own = all.entry((tenant.to_owned(), key.to_owned())).or_default();
        own.upgrade().unwrap_or_else(|| {
            let turn = Arc::default();
            *own = Arc::downgrade(&turn);
            turn
        })
    }

    /// How many there are of all tenants, those that are being started among them.
    pub fn count(&self) -> usize {
        let starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        starting.values().sum::<usize>() + self.lock().len()
    }

    pub fn all(&self) -> Vec<Arc<Sandbox>> {
        self.lock().values().cloned().collect()
    }

    pub fn get(&self, id: &str) -> Option<Arc<Sandbox>> {
        self.lock().get(id).cloned()
    }

    /// The sandbox `id` of `tenant`. Another's is not there.
    pub fn find(&self, tenant: &str, id: &str) -> Result<Arc<Sandbox>> {
        let found = self.get(id).filter(|sandbox| sandbox.tenant() == tenant);
        found.ok_or_else(|| Problem::not_found(format!("sandbox {id:?} was not found")))
    }

    /// The same where it is to be the tenant's to use: nobody uses one that is being started.
    pub fn find_begun(&self, tenant: &str, id: &str) -> Result<Arc<Sandbox>> {
        let found = self.find(tenant, id)?;
        match found.has_begun() {
            true => Ok(found),
            false => Err(Problem::conflict(format!(
                "sandbox {id} is being started: the call that makes it says when it is ready"
            ))),
        }
    }

    /// The sandbox `id`, if clients may use it.
    pub fn get_begun(&self, id: &str) -> Option<Arc<Sandbox>> {
        self.get(id).filter(|sandbox| sandbox.has_begun())
    }

    /// Writes down what has changed.
    pub async fn write(&self, note: Note) -> Result<()> {
        let (notes, own) = (self.notes.clone(), self.get(&note.id));
        blocking(move || {
            let failed =
                |error| Problem::internal(format!("cannot write the sandbox down: {error}"));
            // Another change may have come since.
            notes.write(|| own.map_or(note, |own| own.note())).map_err(failed)
        })
        .await
    }

    /// Takes a sandbox in that runs, and follows it by `session` to its end.
    pub async fn take(self: &Arc<Self>, sandbox: &Arc<Sandbox>, session: UnixStream) {
        self.follow(sandbox, session);
        self.show(sandbox).await;
    }

    /// Follows a sandbox by `session` to its end.
    pub fn follow(self: &Arc<Self>, sandbox: &Arc<Sandbox>, session: UnixStream) {
        let (server, own) = (self.clone(), sandbox.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = hear(session) => {}
                () = own.gone() => {}
            }
            server.bury(&own).await;
        });
    }

    /// Has its tenant find a sandbox that is followed.
    pub async fn show(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        self.lock().insert(sandbox.id.clone(), sandbox.clone());
        // Its end may have come just before.
        if sandbox.has_ended() {
            return self.bury(sandbox).await;
        }
        let (server, own) = (self.clone(), sandbox.clone());
        tokio::spawn(async move { server.keep_time(&own).await });
    }

    /// Does what is to be done when its time is over, as often as that is.
    async fn keep_time(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        let mut deadline = sandbox.deadline();
        loop {
            let at = *deadline.borrow_and_update();
            tokio::select! {
                () = sandbox.gone() => return,
                changed = deadline.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(sandbox::until(at)) => self.time_is_over(sandbox).await,
            }
        }
    }

    async fn time_is_over(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        let held = sandbox.changing.lock().await;
        // It may have been given more meanwhile.
        if *sandbox.deadline().borrow() > now_ms() {
            return;
        }
        sandbox.stop_saving();
        let note = sandbox.note();
        if note.on_timeout == OnTimeout::Pause && note.paused_ms.is_none() {
            info!(sandbox = sandbox.id, "its time is over: paused");
            match self.pause_held(sandbox).await {
                Ok(()) => return,
                Err(error) => warn!(sandbox = sandbox.id, "cannot pause: {error}"),
            }
        }
        info!(sandbox = sandbox.id, "its time is over: ended");
        if let Err(error) = self.kill_held(sandbox).await {
            warn!(sandbox = sandbox.id, "cannot end: {error}");
        }
        drop(held);
        // One that does not end is tried again, but not at once.
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }

    /// Ends it, whatever it does. `changing` is held.
    pub async fn kill_held(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<()> {
        let (layout, record) = (self.layout().clone(), sandbox.record.clone());
        blocking(move || {
            end::kill(&layout, &record, Signal::KILL)?;
            record.await_release();
            Ok(())
        })
        .await?;
        self.bury(sandbox).await;
        Ok(())
    }

    /// Stops it where it is. `changing` is held.
    pub async fn pause_held(&self, sandbox: &Arc<Sandbox>) -> Result<()> {
        let record = sandbox.record.clone();
        blocking(move || Ok(end::pause(&record, true)?)).await?;
        self.write(sandbox.change(|note| note.paused_ms = Some(now_ms()))).await
    }

    /// Lets it go on, for so long from now; false where it ran.
    pub async fn resume(&self, sandbox: &Arc<Sandbox>, deadline_ms: u64) -> Result<bool> {
        let _held = sandbox.changing.lock().await;
        if !sandbox.is_paused() {
            return Ok(false);
        }
        let record = sandbox.record.clone();
        blocking(move || match record.is_paused() {
            true => Ok(end::pause(&record, false)?),
            false => Ok(()),
        })
        .await?;
        let note = sandbox.change(|note| {
            note.paused_ms = None;
            note.deadline_ms = deadline_ms;
        });
        self.write(note).await.map(|()| true)
    }

    /// It has ended: nothing of it is left.
    async fn bury(&self, sandbox: &Arc<Sandbox>) {
        let was_shown = self.lock().remove(&sandbox.id).is_some();
        let was_warm = self.pool.forget(&sandbox.id);
        sandbox.end();
        if !was_shown && !was_warm {
            return;
        }
        self.clear(sandbox).await;
    }

    /// Ends one that no tenant has.
    pub async fn discard(self: &Arc<Self>, sandbox: &Arc<Sandbox>) {
        let (layout, record) = (self.layout().clone(), sandbox.record.clone());
        // One that has ended cannot be.
        let _ = blocking(move || Ok(end::kill(&layout, &record, Signal::KILL)?)).await;
        self.lock().remove(&sandbox.id);
        sandbox.end();
        self.clear(sandbox).await;
    }

    /// Removes what is left of one that has ended.
    async fn clear(&self, sandbox: &Sandbox) {
        let (notes, layout) = (self.notes.clone(), self.layout().clone());
        let (id, record) = (sandbox.id.clone(), sandbox.record.clone());
        let cleared = blocking(move || {
            // It removes itself, unless somebody killed its supervisor.
            record.await_release();
            if let Ok((record, _, status)) = Record::find(&layout, &id) {
                end::remove(&layout, &record, &status, true)?;
            }
            notes.remove(&id);
            Ok(())
        });
        if let Err(error) = cleared.await {
            warn!(sandbox = sandbox.id, "cannot be removed: {error}");
        }
    }

    /// Finds the sandboxes of earlier servers again.
    pub async fn adopt_all(self: &Arc<Self>) {
        let notes = self.notes.clone();
        let all = blocking(move || {
            notes.sweep();
            Ok(notes.all())
        })
        .await
        .unwrap_or_default();
        for note in all {
            let (id, layout) = (note.id.clone(), self.layout().clone());
            let found = blocking(move || Ok(look(&layout, &note)?.map(|found| (found, note))));
            match found.await {
                Ok(Some(((record, session), mut note))) => {
                    // The supervisor knows best.
                    note.paused_ms = record.is_paused().then(|| note.paused_ms.unwrap_or(now_ms()));
                    let sandbox = Sandbox::new(record, note, &self.bounds);
                    let Ok(session) = listened(session) else { continue };
                    // Nobody is left who would say when it is ready.
                    sandbox.begin();
                    self.take(&sandbox, session).await;
                    if !sandbox.is_paused() {
                        programs::adopt(self, &sandbox).await;
                    }
                }
                Ok(None) => {
                    let (notes, layout) = (self.notes.clone(), self.layout().clone());
                    let cleared = blocking(move || {
                        if let Ok((record, _, status)) = Record::find(&layout, &id) {
                            end::remove(&layout, &record, &status, true)?;
                        }
                        notes.remove(&id);
                        Ok(())
                    });
                    if let Err(error) = cleared.await {
                        warn!("a sandbox that has ended stays: {error}");
                    }
                }
                // It may be reached by the next server.
                Err(error) => warn!(sandbox = id, "cannot be reached: {error}"),
            }
        }
    }
}

/// The record of a sandbox that runs, and a session that follows it; `None` when it has ended, or
/// was never whole.
fn look(
    layout: &Layout,
    note: &Note,
) -> std::result::Result<Option<(Record, BlockingStream)>, CellError> {
    let (record, status): (Record, Status) = match Record::find(layout, &note.id) {
        Ok((record, _, status)) => (record, status),
        Err(CellError::NoSuchCell(_)) => return Ok(None),
        Err(error) => return Err(error),
    };
    if status.state == State::Exited {
        return Ok(None);
    }
    let client = Client::connect(&record)?;
    client.ask(&ControlRequest::Attach { replay: false })?;
    Ok(Some((record, client.into_stream())))
}

/// Waits for the end of a session.
async fn hear(mut session: UnixStream) {
    while let Ok(Some(frame)) = read_frame(&mut session).await {
        if frame.kind == Kind::Reply && !matches!(frame.json(), Ok(Reply::Started { .. })) {
            return;
        }
    }
}
