//! Events to containerd, in the order in which they happened.
//!
//! One thread sends them, so that neither a slow nor a restarted containerd holds a container up or
//! changes the order. An event that cannot be sent for some time is lost, with a line in the log.

use std::os::fd::IntoRawFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use containerd_shim_protos::events::task::{
    TaskCreate, TaskDelete, TaskExecAdded, TaskExecStarted, TaskExit, TaskOOM, TaskPaused,
    TaskResumed, TaskStart,
};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::well_known_types::timestamp::Timestamp;
use containerd_shim_protos::protobuf::{MessageField, MessageFull};
use containerd_shim_protos::shim::event::Envelope;
use containerd_shim_protos::shim::events::ForwardRequest;
use containerd_shim_protos::ttrpc::context::with_duration;
use containerd_shim_protos::{Client, EventsClient, topics};
use tracing::warn;

use crate::error::{Result, ShimError};

/// Events that wait; one more waits for its place.
const WAITING_MAX: usize = 4096;
/// How often sending one is tried, after how long again, and how long containerd may take.
const TRIES: u32 = 60;
const AGAIN: Duration = Duration::from_millis(500);
const SEND_MAX: Duration = Duration::from_secs(5);

/// Where events go; clones are the same.
#[derive(Clone)]
pub struct Events {
    queue: SyncSender<Envelope>,
    namespace: String,
    unsent: Arc<(Mutex<usize>, Condvar)>,
}

/// An event of containerd's, and its topic.
pub trait Event: MessageFull {
    const TOPIC: &'static str;
}

macro_rules! topics {
    ($($event:ty => $topic:expr,)*) => {
        $(impl Event for $event {
            const TOPIC: &'static str = $topic;
        })*
    };
}

topics! {
    TaskCreate => topics::TASK_CREATE_EVENT_TOPIC,
    TaskStart => topics::TASK_START_EVENT_TOPIC,
    TaskExit => topics::TASK_EXIT_EVENT_TOPIC,
    TaskDelete => topics::TASK_DELETE_EVENT_TOPIC,
    TaskOOM => topics::TASK_OOM_EVENT_TOPIC,
    TaskExecAdded => topics::TASK_EXEC_ADDED_EVENT_TOPIC,
    TaskExecStarted => topics::TASK_EXEC_STARTED_EVENT_TOPIC,
    TaskPaused => topics::TASK_PAUSED_EVENT_TOPIC,
    TaskResumed => topics::TASK_RESUMED_EVENT_TOPIC,
}

impl Events {
    /// Starts the thread that sends to containerd at `address`.
    ///
    /// # Errors
    /// The host has no thread.
    pub fn begin(address: &str, namespace: &str) -> Result<Self> {
        let (queue, waiting) = sync_channel(WAITING_MAX);
        let unsent: Arc<(Mutex<usize>, Condvar)> = Arc::default();
        let sender = Sender {
            address: address.trim_start_matches("unix://").to_owned(),
            client: None,
            unsent: unsent.clone(),
        };
        std::thread::Builder::new()
            .name("events".to_owned())
            .spawn(move || sender.run(&waiting))
            .map_err(ShimError::host("cannot start a thread"))?;
        Ok(Self { queue, namespace: namespace.to_owned(), unsent })
    }

    /// Has `event` sent after all that came before.
    pub fn send<E: Event>(&self, event: &E) {
        let Ok(value) = event.write_to_bytes() else { return };
        let any = any(E::descriptor().full_name(), value);
        let envelope = Envelope {
            timestamp: MessageField::some(timestamp(SystemTime::now())),
            namespace: self.namespace.clone(),
            topic: E::TOPIC.to_owned(),
            event: MessageField::some(any),
            ..Envelope::default()
        };
        *self.unsent.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        // Its thread ends with the process.
        let _ = self.queue.send(envelope);
    }

    /// Waits until all are sent, at most `limit`.
    pub fn flush(&self, limit: Duration) {
        let unsent = self.unsent.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.unsent.1.wait_timeout_while(unsent, limit, |unsent| *unsent > 0);
    }
}

/// A message of the type `name`, as containerd's `typeurl` has it: without a host.
pub fn any(name: &str, value: Vec<u8>) -> Any {
    Any { type_url: name.to_owned(), value, ..Any::default() }
}

/// A time as messages have it.
pub fn timestamp(at: SystemTime) -> Timestamp {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_nanos()).unwrap_or(0),
        ..Timestamp::default()
    }
}

struct Sender {
    address: String,
    client: Option<EventsClient>,
    unsent: Arc<(Mutex<usize>, Condvar)>,
}

impl Sender {
    fn run(mut self, waiting: &Receiver<Envelope>) {
        while let Ok(envelope) = waiting.recv() {
            let request =
                ForwardRequest { envelope: MessageField::some(envelope), ..Default::default() };
            let mut tries = 0;
            while let Err(error) = self.send(&request) {
                // A connection to a containerd that has ended is of no use to the next.
                self.client = None;
                tries += 1;
                if tries >= TRIES {
                    let topic = request.envelope.topic.as_str();
                    warn!(topic, %error, "an event is lost: containerd does not take it");
                    break;
                }
                sleep(AGAIN);
            }
            *self.unsent.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
            self.unsent.1.notify_all();
        }
    }

    fn send(&mut self, request: &ForwardRequest) -> Result<()> {
        let client = match &self.client {
            Some(client) => client,
            None => self.client.insert(self.connect()?),
        };
        let sent = client.forward(with_duration(SEND_MAX), request);
        sent.map(drop).map_err(ShimError::host("cannot send an event"))
    }

    fn connect(&self) -> Result<EventsClient> {
        let failed = format!("cannot reach containerd at {}", self.address);
        let stream = UnixStream::connect(&self.address).map_err(ShimError::host(failed.clone()))?;
        let client = Client::new(stream.into_raw_fd()).map_err(ShimError::host(failed))?;
        Ok(EventsClient::new(client))
    }
}
