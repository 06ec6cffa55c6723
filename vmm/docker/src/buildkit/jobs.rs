//! Builds of one connection, by the names that their client gave them (`Ref`).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use exocell_cell::Layout;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use crate::build::{Built, Stopper};
use crate::grpc::{Code, Result, Status};
use crate::progress::Journal;

/// Builds of one connection at once, and those that are over and were not asked after.
const JOBS_MAX: usize = 128;
/// The longest name, in bytes.
const NAME_BYTES_MAX: usize = 128;
/// How long a call waits for the build that it names: clients begin both at once.
const COMES_MAX: Duration = Duration::from_secs(10);
/// Images that builds of a connection may go on from.
const MADE_MAX: usize = 64;
/// Images of one build that wait for what is to be done with them.
const RESULTS_MAX: usize = 16;

/// What sources are called that are images of builds.
const SCHEME: &str = "exocell-image://";

/// See the module's head.
#[derive(Default)]
pub struct Jobs {
    all: Mutex<HashMap<String, Arc<Job>>>,
    came: Notify,
    /// What was built last, for builds that go on from there.
    made: Mutex<VecDeque<(String, Arc<Built>)>>,
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Jobs {
    /// Begins a build.
    ///
    /// # Errors
    /// There is one of that name, or there are too many.
    pub fn open(&self, name: &str, session: &str) -> Result<Arc<Job>> {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            let words = format!("a build has a name (Ref) of 1 to {NAME_BYTES_MAX} bytes");
            return Err(Status::invalid(words));
        }
        let mut all = locked(&self.all);
        if all.contains_key(name) {
            let words = format!("there is a build {name} already");
            return Err(Status::new(Code::AlreadyExists, words));
        }
        if all.len() >= JOBS_MAX {
            all.retain(|_, job| !job.is_over());
        }
        if all.len() >= JOBS_MAX {
            let words = format!("a connection has at most {JOBS_MAX} builds at once");
            return Err(Status::new(Code::ResourceExhausted, words));
        }
        let job = Arc::new(Job {
            session: session.to_owned(),
            name: name.to_owned(),
            journal: Arc::default(),
            stopper: Stopper::default(),
            stop: watch::channel(false).0,
            is_over: AtomicBool::new(false),
            results: Mutex::default(),
            count: AtomicU32::new(0),
            warnings: Mutex::default(),
            failure: Mutex::default(),
            returned: watch::channel(None).0,
        });
        all.insert(name.to_owned(), job.clone());
        drop(all);
        self.came.notify_waiters();
        Ok(job)
    }

    /// The build called `name`, which may begin a little later than what is asked of it.
    ///
    /// # Errors
    /// It did not begin.
    pub async fn wait(&self, name: &str) -> Result<Arc<Job>> {
        let found = async {
            loop {
                let came = self.came.notified();
                if let Some(job) = locked(&self.all).get(name).cloned() {
                    return job;
                }
                came.await;
            }
        };
        timeout(COMES_MAX, found)
            .await
            .map_err(|_| Status::new(Code::NotFound, format!("there is no build {name:?}")))
    }

    /// Keeps an image of `job`; how it is called there.
    ///
    /// # Errors
    /// It has too many.
    pub fn keep(&self, job: &Job, built: Built) -> Result<String> {
        let built = Arc::new(built);
        let name = job.keep(built.clone())?;
        let mut made = locked(&self.made);
        made.truncate(MADE_MAX - 1);
        made.push_front((job.identifier(&name), built));
        Ok(name)
    }

    /// The image that another build calls so.
    pub fn made(&self, identifier: &str) -> Option<Arc<Built>> {
        let made = locked(&self.made);
        made.iter().find(|(own, _)| own == identifier).map(|(_, built)| built.clone())
    }

    /// Nothing more will be asked of it.
    pub fn forget(&self, job: &Job) {
        if job.is_over() {
            locked(&self.all).remove(&job.name);
        }
    }
}

/// One build.
pub struct Job {
    pub name: String,
    /// The session that it is in.
    pub session: String,
    pub journal: Arc<Journal>,
    pub stopper: Stopper,
    /// True once nobody wants it any more.
    pub stop: watch::Sender<bool>,
    is_over: AtomicBool,
    /// Images, by the names that the client has for them.
    results: Mutex<BTreeMap<String, Arc<Built>>>,
    count: AtomicU32,
    /// What the client is to know.
    warnings: Mutex<Vec<&'static str>>,
    /// Why it failed, in words of its own: the client says it again.
    failure: Mutex<Option<Status>>,
    /// What a client that steers its build has said last: which image it is, if any.
    returned: watch::Sender<Option<Result<Option<String>>>>,
}

impl Job {
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// By what other builds know its image.
    pub fn identifier(&self, image: &str) -> String {
        format!("{SCHEME}{}/{image}", self.name)
    }

    fn keep(&self, built: Arc<Built>) -> Result<String> {
        let mut results = locked(&self.results);
        if results.len() == RESULTS_MAX {
            let words = format!("a build has at most {RESULTS_MAX} images");
            return Err(Status::new(Code::ResourceExhausted, words));
        }
        let name = format!("image-{}", self.count.fetch_add(1, Ordering::SeqCst));
        results.insert(name.clone(), built);
        Ok(name)
    }

    /// Takes an image out.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn take(&self, name: &str) -> Result<Arc<Built>> {
        let found = locked(&self.results).remove(name);
        found.ok_or_else(|| Self::no_image(name))
    }

    /// Whether there is that image.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn check(&self, name: &str) -> Result<()> {
        match locked(&self.results).contains_key(name) {
            true => Ok(()),
            false => Err(Self::no_image(name)),
        }
    }

    fn no_image(name: &str) -> Status {
        Status::new(Code::NotFound, format!("the build has no image {name:?}"))
    }

    /// Has the client be told, once it is told of an image.
    pub fn warn(&self, words: &'static str) {
        locked(&self.warnings).push(words);
    }

    pub fn warnings(&self) -> Vec<&'static str> {
        std::mem::take(&mut locked(&self.warnings))
    }

    pub fn fail(&self, status: &Status) {
        locked(&self.failure).get_or_insert_with(|| status.clone());
    }

    /// The client says what the build has come to.
    pub fn return_with(&self, outcome: Result<Option<String>>) {
        self.returned.send_replace(Some(outcome));
    }

    /// Waits for that. What failed here is told as it was.
    ///
    /// # Errors
    /// The client's, or the build's own.
    pub async fn returned(&self) -> Result<Option<String>> {
        let mut returned = self.returned.subscribe();
        let Ok(said) = returned.wait_for(Option::is_some).await else {
            return Err(Status::new(Code::Cancelled, "the build has ended"));
        };
        let said = said.clone().unwrap_or(Ok(None));
        said.map_err(|status| locked(&self.failure).clone().unwrap_or(status))
    }

    /// Nobody wants it any more. Its cell is ended on a thread that may block.
    pub fn cancel(self: &Arc<Self>, layout: &Layout, handle: &Handle) {
        self.stop.send_replace(true);
        let (job, layout) = (self.clone(), layout.clone());
        handle.spawn_blocking(move || job.stopper.stop(&layout));
    }
}

/// Ends its build: what goes on then, and what was kept.
pub struct Guard {
    pub job: Arc<Job>,
    pub layout: Layout,
    pub handle: Handle,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.job.cancel(&self.layout, &self.handle);
        self.job.is_over.store(true, Ordering::SeqCst);
        locked(&self.job.results).clear();
        self.job.journal.end();
    }
}
