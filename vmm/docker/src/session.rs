//! Sessions of BuildKit's clients: connections on which the client answers, and the server asks for
//! what a build needs of it.
//!
//! ```text
//! client ── POST /session ──> its end of HTTP/2 answers: files, secrets, credentials, archives
//!        ── POST /grpc ─────> Solve(session) ──> a build, which asks in that session
//! ```
//! [`transfer`] reads the files that a client sends, [`delivery`] sends it a tree of files. The
//! messages are those of moby/buildkit's `session` and tonistiigi/fsutil's `types`.

pub mod delivery;
pub mod messages;
pub mod transfer;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hyper::HeaderMap;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use crate::grpc::client::{Channel, Exchange};
use crate::grpc::{Code, Result, Status, said};
use messages::{Credentials, Host, Packet, Secret, SecretId};
use transfer::Line;

/// How long a build waits for the session that it names.
const COMES_MAX: Duration = Duration::from_secs(10);
/// The longest id of a session, in bytes, and the most methods that one has.
const ID_BYTES_MAX: usize = 128;
const METHODS_MAX: usize = 64;
/// The longest secret, in bytes: as BuildKit has it.
const SECRET_BYTES_MAX: usize = 500 << 10;
/// The longest packet of a transfer, in bytes.
const PACKET_BYTES_MAX: usize = 4 << 20;
/// Answers of a few words.
const WORDS_BYTES_MAX: usize = 64 << 10;

/// Those that are there now.
#[derive(Default)]
pub struct Sessions {
    all: Mutex<HashMap<String, Session>>,
    came: Notify,
}

impl Sessions {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Session>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a session found by its id as long as the result is held; nothing where another is called
    /// so.
    pub fn add(self: &Arc<Self>, session: Session) -> Option<Listed> {
        let mut all = self.all();
        if all.contains_key(&session.id) {
            return None;
        }
        let listed = Listed { id: session.id.clone(), sessions: self.clone() };
        all.insert(session.id.clone(), session);
        drop(all);
        self.came.notify_waiters();
        Some(listed)
    }

    /// The session `id`, which may come a little later than the build that names it.
    ///
    /// # Errors
    /// It did not come.
    pub async fn wait(&self, id: &str) -> Result<Session> {
        let found = async {
            loop {
                let came = self.came.notified();
                if let Some(session) = self.all().get(id).cloned() {
                    return session;
                }
                came.await;
            }
        };
        timeout(COMES_MAX, found)
            .await
            .map_err(|_| Status::new(Code::NotFound, format!("there is no session {id:?}")))
    }
}

/// A session that is found.
pub struct Listed {
    id: String,
    sessions: Arc<Sessions>,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.sessions.all().remove(&self.id);
    }
}

/// Who a session is, as the head of its call says.
pub struct Named {
    pub id: String,
    methods: BTreeSet<String>,
}

impl Named {
    /// # Errors
    /// It says no id, or too much.
    pub fn of(head: &HeaderMap) -> std::result::Result<Self, String> {
        let id = said(head, "x-docker-expose-session-uuid").unwrap_or_default();
        if id.is_empty() || id.len() > ID_BYTES_MAX {
            return Err(format!(
                "a session has an id of 1 to {ID_BYTES_MAX} bytes (X-Docker-Expose-Session-Uuid)"
            ));
        }
        let methods = head.get_all("x-docker-expose-session-grpc-method");
        let methods = methods.iter().filter_map(|value| value.to_str().ok());
        let methods: BTreeSet<String> =
            methods.take(METHODS_MAX).map(str::to_ascii_lowercase).collect();
        Ok(Self { id: id.to_owned(), methods })
    }
}

/// One session.
#[derive(Clone)]
pub struct Session {
    id: String,
    methods: BTreeSet<String>,
    channel: Channel,
}

impl Session {
    pub fn new(named: Named, channel: Channel) -> Self {
        let Named { id, methods } = named;
        Self { id, methods, channel }
    }

    /// Waits until the client is gone.
    pub async fn gone(&self) {
        self.channel.gone().await;
    }

    fn check(&self, path: &str, what: &str) -> Result<()> {
        match self.methods.contains(&path.to_ascii_lowercase()) {
            true => Ok(()),
            false => Err(Status::new(Code::Unimplemented, format!("the client gives no {what}"))),
        }
    }

    /// The secret `id`, if the client has it.
    ///
    /// # Errors
    /// The client does not say.
    pub async fn secret(&self, id: &str) -> Result<Option<Vec<u8>>> {
        let path = "/moby.buildkit.secrets.v1.Secrets/GetSecret";
        if self.check(path, "secrets").is_err() {
            return Ok(None);
        }
        // Its field's number and length.
        let most = SECRET_BYTES_MAX + 16;
        let asked = SecretId { id: id.to_owned() };
        match self.channel.ask::<_, Secret>(path, &asked, most).await {
            Ok(secret) => Ok(Some(secret.data)),
            Err(Status { code: Code::NotFound | Code::Unimplemented, .. }) => Ok(None),
            Err(status) => Err(status),
        }
    }

    /// User and password for the registry `host`, if the client has some.
    ///
    /// # Errors
    /// The client does not say.
    pub async fn credentials(&self, host: &str) -> Result<Option<(String, String)>> {
        let path = "/moby.filesync.v1.Auth/Credentials";
        if self.check(path, "credentials").is_err() {
            return Ok(None);
        }
        let asked = Host { host: host.to_owned() };
        let said: Credentials = self.channel.ask(path, &asked, WORDS_BYTES_MAX).await?;
        Ok((!said.username.is_empty()).then_some((said.username, said.secret)))
    }

    /// Has the client send files of its directory `name`.
    ///
    /// # Errors
    /// It has none, or is gone.
    pub async fn files(&self, name: &str, wanted: &Wanted) -> Result<Exchange> {
        let path = "/moby.filesync.v1.FileSync/DiffCopy";
        self.check(path, "files")?;
        let mut head = Vec::new();
        let lists = [
            ("exclude-patterns", "exclude-patterns-encoded", &wanted.left_out),
            ("followpaths", "followpaths-encoded", &wanted.only),
        ];
        add(&mut head, "dir-name", "dir-name-encoded", std::slice::from_ref(&name.to_owned()));
        for (key, marked, words) in lists {
            add(&mut head, key, marked, words);
        }
        self.channel.open(path, &head, PACKET_BYTES_MAX).await
    }

    /// The archive that the client has behind `path` of an address.
    ///
    /// # Errors
    /// It has none, or is gone.
    pub async fn archive(&self, host: &str, path: &str) -> Result<Exchange> {
        let method = "/moby.upload.v1.Upload/Pull";
        self.check(method, "archives")?;
        let head = [("urlhost", host.to_owned()), ("urlpath", path.to_owned())];
        self.channel.open(method, &head, PACKET_BYTES_MAX).await
    }

    /// Begins to send the client what its output `number` is.
    ///
    /// # Errors
    /// It takes none, or is gone.
    pub async fn output(&self, number: usize) -> Result<Exchange> {
        let path = "/moby.filesync.v1.FileSend/DiffCopy";
        self.check(path, "place for an output")?;
        let head = [("buildkit-attachable-exporter-id", number.to_string())];
        self.channel.open(path, &head, PACKET_BYTES_MAX).await
    }
}

/// Which files of a directory are wanted.
#[derive(Debug, Default)]
pub struct Wanted {
    /// Patterns of `.dockerignore`.
    pub left_out: Vec<String>,
    /// Paths, and what their links lead to; all where there are none.
    pub only: Vec<String>,
}

/// Adds words to a head, encoded where one is not plain.
fn add(
    head: &mut Vec<(&'static str, String)>,
    key: &'static str,
    marked: &'static str,
    words: &[String],
) {
    let is_plain = |word: &String| word.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
    let encodes = !words.iter().all(is_plain);
    for word in words {
        let encoded = || utf8_percent_encode(word, NON_ALPHANUMERIC).to_string();
        head.push((key, if encodes { encoded() } else { word.clone() }));
    }
    if encodes {
        head.push((marked, "1".to_owned()));
    }
}

/// An exchange with a client, for a thread that may block.
pub struct Patient<'a> {
    pub handle: &'a Handle,
    pub exchange: Exchange,
    /// True once nobody wants it any more.
    pub stop: watch::Receiver<bool>,
}

impl Patient<'_> {
    /// Waits for `work`, or until nobody wants it any more.
    fn wait<T>(
        handle: &Handle,
        stop: &mut watch::Receiver<bool>,
        work: impl Future<Output = Result<T>>,
    ) -> io::Result<T> {
        let done = handle.block_on(async {
            tokio::select! {
                done = work => done,
                _ = stop.wait_for(|stop| *stop) => {
                    Err(Status::new(Code::Cancelled, "the build was cancelled"))
                }
            }
        });
        done.map_err(io::Error::other)
    }

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// The client's, or it is gone.
    pub fn message<M: prost::Message + Default>(&mut self) -> io::Result<Option<M>> {
        Self::wait(self.handle, &mut self.stop, self.exchange.next())
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The client is gone.
    pub fn send<M: prost::Message>(&mut self, message: &M) -> io::Result<()> {
        Self::wait(self.handle, &mut self.stop, self.exchange.send(message))
    }

    /// Sends no more, and waits for the client's end.
    ///
    /// # Errors
    /// The client's.
    pub fn finish(&mut self) -> io::Result<()> {
        self.exchange.close_sending();
        while self.message::<messages::Chunk>()?.is_some() {}
        Ok(())
    }
}

impl Line for Patient<'_> {
    fn receive(&mut self) -> io::Result<Option<Packet>> {
        self.message()
    }

    fn send(&mut self, packet: &Packet) -> io::Result<()> {
        Patient::send(self, packet)
    }
}
