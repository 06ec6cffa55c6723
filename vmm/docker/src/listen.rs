//! The socket, its connections, and the server's end.

use std::convert::Infallible;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use exocell_cell::images::private;
use exocell_cell::logging::tracing::{debug, info, warn};
use exocell_cell::{Layout, engine};
use hyper::body::Incoming;
use hyper::header::{HeaderValue, SERVER, UPGRADE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;

use crate::admit::Defaults;
use crate::containers::Containers;
use crate::error::{ApiError, ApiResult, ServeError};
use crate::http::{Body, Call, Inlet, Response, failed};
use crate::lifecycle::{self, restarts};
use crate::place::{Place, Seat};
use crate::route::route;
use crate::state::Server;
use crate::target::{Target, VERSION_MAX};
use crate::whose::{self, Side, Whose};

/// Connections at once.
const CONNECTIONS_MAX: usize = 1024;
/// Descriptors for that: two for each, and as many for what calls open.
const DESCRIPTORS: u64 = 4 * CONNECTIONS_MAX as u64;
/// How long a client may take to send a request's head, or to send another
/// request.
const HEAD_TIME_MAX: Duration = Duration::from_secs(300);
/// The longest name of a socket's file, with its scheme, that is told of another server.
const SOCKET_BYTES_MAX: u64 = 4 << 10;
/// The longest head, in bytes.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Said instead of a path, as to dockerd: the socket that systemd hands over.
pub const GIVEN: &str = "fd://";

/// What a server is started with.
#[derive(Debug, Clone)]
pub struct Options {
    pub layout: Layout,
    /// The socket's path, or [`GIVEN`].
    pub socket: PathBuf,
    pub defaults: Defaults,
}

/// Serves until SIGTERM or SIGINT. The cells go on; `ready` is called when
/// clients may come, with the socket's path.
///
/// # Errors
/// The socket or the state root cannot be used, or another server has one.
pub fn serve(options: &Options, ready: impl FnOnce(&Path)) -> Result<(), ServeError> {
    raise_descriptors();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(2)
        .thread_name("docker")
        .build()
        .map_err(ServeError::host("cannot start threads"))?;
    let served = runtime.block_on(run(options, ready));
    // Clients that still stream do not hold the end up.
    runtime.shutdown_background();
    served
}

/// Descriptors for as many connections as there may be, if the host gives so many.
fn raise_descriptors() {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // With fewer some clients wait longer.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(DESCRIPTORS)), hard);
    }
}

async fn run(options: &Options, ready: impl FnOnce(&Path)) -> Result<(), ServeError> {
    let root = Containers::root(&options.layout);
    let failed = || format!("cannot use {}", root.display());
    private::folder(&root).map_err(ServeError::host(failed()))?;
    let mut lock = lock(options)?;
    let containers = Containers::open(&options.layout).map_err(ServeError::host(failed()))?;
    let Door { listener, path, own } = match options.socket == Path::new(GIVEN) {
        true => given()?,
        false => bind(&options.socket).await?,
    };
    let cells = whose::listen(&options.layout)
        .map_err(ServeError::host("cannot listen for cells that have the socket"))?;
    lock.set_len(0)
        .and_then(|()| lock.write_all(engine::note(&path).as_bytes()))
        .map_err(ServeError::host("cannot note where the server listens"))?;
    let server = Arc::new(Server::new(containers, options.defaults.clone()));
    adopt_all(&server).await;
    let failed = |error| ServeError::host("cannot wait for signals")(error);
    let mut term = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    info!(socket = %path.display(), root = %options.layout.root().display(), "serves");
    ready(&path);
    tokio::select! {
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
        () = accept(&server, &listener, Side::Operator) => {}
        () = accept(&server, &cells, Side::Cell) => {}
    }
    info!(socket = %path.display(), "ends; the cells go on");
    // Somebody may have removed it, or put another file there, which is his.
    if own.is_some() && file_at(&path) == own {
        let _ = fs::remove_file(&path);
    }
    Ok(())
}

/// One server for a state root. The file that it holds says where it listens, once it does.
fn lock(options: &Options) -> Result<File, ServeError> {
    let path = engine::lock(&options.layout);
    let what = || format!("cannot lock {}", path.display());
    let failed = || ServeError::host(what());
    let mut how = private::options();
    let file = how.create(true).truncate(false).read(true).write(true).open(&path);
    let file = file.map_err(failed())?;
    match file.try_lock() {
        // What it says is of an earlier server.
        Ok(()) => file.set_len(0).map(|()| file).map_err(failed()),
        Err(fs::TryLockError::WouldBlock) => {
            let mut said = String::new();
            // A server that has just begun has not said it yet.
            let _ = file.take(SOCKET_BYTES_MAX).read_to_string(&mut said);
            let by = match said.trim() {
                "" => "by another server".to_owned(),
                socket => format!("by the server at {socket}"),
            };
            Err(ServeError::RootTaken { root: options.layout.root().display().to_string(), by })
        }
        Err(fs::TryLockError::Error(error)) => Err(failed()(error)),
    }
}

/// Which file is at `path`, by its device and inode.
fn file_at(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|data| (data.dev(), data.ino()))
}

/// Removes the socket at `path`; nothing else is.
fn remove_socket(path: &Path) -> Result<(), ServeError> {
    let shown = path.display().to_string();
    match fs::symlink_metadata(path) {
        Ok(data) if data.file_type().is_socket() => {
            fs::remove_file(path).map_err(ServeError::host(format!("cannot replace {shown}")))
        }
        Ok(_) => Err(ServeError::NoSocket(shown)),
        Err(_) => Ok(()),
    }
}

/// A socket on which clients come.
struct Door {
    listener: UnixListener,
    path: PathBuf,
    /// Which file it is, if this server made it and removes it at its end.
    own: Option<(u64, u64)>,
}

/// The socket that whoever started this process hands over by the protocol of sd_listen_fds(3).
fn given() -> Result<Door, ServeError> {
    let failed = || ServeError::host("cannot use the socket that was handed over");
    let mut sockets = listenfd::ListenFd::from_env();
    let socket = match sockets.take_unix_listener(0) {
        Ok(Some(socket)) => socket,
        Ok(None) => return Err(ServeError::NotGiven),
        Err(error) => return Err(failed()(error)),
    };
    socket.set_nonblocking(true).map_err(failed())?;
    let address = socket.local_addr().map_err(failed())?;
    let path = address.as_pathname().unwrap_or(Path::new(GIVEN)).to_owned();
    let listener = UnixListener::from_std(socket).map_err(failed())?;
    Ok(Door { listener, path, own: None })
}

/// Listens at `socket`, for its owner only. A socket that nobody listens on
/// is a dead server's, and replaced. Any other file stays what it is.
async fn bind(socket: &Path) -> Result<Door, ServeError> {
    let shown = socket.display().to_string();
    if UnixStream::connect(socket).await.is_ok() {
        return Err(ServeError::Taken(shown));
    }
    remove_socket(socket)?;
    let failed = || ServeError::host(format!("cannot listen on {shown}"));
    // Under another name until only its owner can connect.
    let name = socket.file_name().unwrap_or_default().to_string_lossy();
    let new = socket.with_file_name(format!(".{name}.new"));
    remove_socket(&new)?;
    let listener = UnixListener::bind(&new).map_err(failed())?;
    let own = file_at(&new).ok_or(io::ErrorKind::NotFound.into()).map_err(failed())?;
    let (path, own) = (socket.to_owned(), Some(own));
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).map_err(failed())?;
    // What somebody has put there meanwhile is not replaced.
    let named = renameat2(AT_FDCWD, &new, AT_FDCWD, socket, RenameFlags::RENAME_NOREPLACE);
    if let Err(error) = named {
        let _ = fs::remove_file(&new);
        return Err(failed()(error.into()));
    }
    Ok(Door { listener, path, own })
}

/// Follows what runs already, and finds out what is over.
async fn adopt_all(server: &Arc<Server>) {
    let all = server.blocking(|server| server.containers.all()).await.unwrap_or_default();
    restarts::revive(server, &all);
    for mut seen in all {
        if seen.is_running() {
            // One that is just ending needs no follower.
            let _ = lifecycle::adopt(server, &seen).await;
        }
        if seen.is_restarting() {
            restarts::follow(server, &seen.container);
        }
        if seen.cell.is_some() && !seen.container.started {
            // The last server died between the cell's launch and this note.
            seen.container.started = true;
            let _ = server.blocking(move |s| s.containers.write(&seen.container)).await;
        }
    }
}

async fn accept(server: &Arc<Server>, listener: &UnixListener, from: Side) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                // Out of descriptors: this client may come again.
                if let Ok(seat) = Seat::new(place, &stream) {
                    tokio::spawn(receive(server.clone(), stream, Arc::new(seat), from));
                }
            }
            // Out of descriptors: some will be free again.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn receive(server: Arc<Server>, mut stream: UnixStream, place: Place, from: Side) {
    // Who does not say who he is is not spoken to.
    if let Ok(whose) = Whose::of(from, &mut stream).await {
        converse(server, stream, place, whose).await;
    }
}

async fn converse(server: Arc<Server>, stream: UnixStream, place: Place, whose: Whose) {
    let service = service_fn(move |request| {
        let (server, place, whose) = (server.clone(), place.clone(), whose.clone());
        async move { Ok::<_, Infallible>(answer(&server, request, place, whose).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .half_close(true)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    // What a client broke off is its own affair.
    let _ = connection.await;
}

async fn answer(
    server: &Arc<Server>,
    request: hyper::Request<Incoming>,
    place: Place,
    whose: Whose,
) -> Response {
    let (begun, method) = (Instant::now(), request.method().clone());
    let path = request.uri().path().to_owned();
    let result = try_answer(server, request, place.clone(), whose).await;
    if let Err(error) = &result
        && error.status.is_server_error()
    {
        warn!(%method, path, status = error.status.as_u16(), "{}", error.message);
    }
    let response = result.unwrap_or_else(|error| failed(&error));
    let took_us = begun.elapsed().as_micros() as u64;
    debug!(%method, path, status = response.status().as_u16(), took_us, "answered");
    let mut response = response.map(|body: Body| body.for_client(place));
    let headers = response.headers_mut();
    let version = HeaderValue::from_str(&format!("1.{VERSION_MAX}"));
    headers.extend(
        version
            .ok()
            .map(|version| (hyper::header::HeaderName::from_static("api-version"), version)),
    );
    headers.insert("ostype", HeaderValue::from_static("linux"));
    headers.insert("docker-experimental", HeaderValue::from_static("false"));
    headers.insert(SERVER, HeaderValue::from_static("Exocell (linux)"));
    response
}

async fn try_answer(
    server: &Arc<Server>,
    mut request: hyper::Request<Incoming>,
    place: Place,
    whose: Whose,
) -> ApiResult<Response> {
    let caller = whose.caller(server).await?;
    let target = Target::parse(request.uri().path(), request.uri().query())?;
    let upgrade = hyper::upgrade::on(&mut request);
    let (head, body) = request.into_parts();
    let wants_upgrade = head.headers.contains_key(UPGRADE);
    let (headers, upgrade) = (head.headers, Some(upgrade));
    let body = Inlet::new(body);
    let call = Call { target, headers, body, upgrade, wants_upgrade, place, caller };
    // On a task of its own: a client that hangs up does not stop a call half way.
    let (server, method) = (server.clone(), head.method);
    let answered = tokio::spawn(async move { route(&server, method.as_str(), call).await });
    answered.await.unwrap_or_else(|_| Err(ApiError::internal("the call failed")))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::containers;
    use exocell_cell::intra::Intra;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::timeout;

    /// Nothing that is waited for in a test takes so long.
    const LONG: Duration = Duration::from_secs(60);

    /// A server whose one container, `quiet`, was never started.
    pub fn server(root: &Path) -> Arc<Server> {
        let defaults = Defaults {
            memory_bytes: 1 << 30,
            disk_bytes: 1 << 30,
            vcpus: 1,
            processes: 64,
            intra: Intra::default(),
            connect: Vec::new(),
        };
        Arc::new(Server::new(containers::tests::with_one(root, "quiet"), defaults))
    }

    /// A connection on which `bytes` were said, once it has one of `places`.
    pub async fn say(server: &Arc<Server>, places: &Arc<Semaphore>, bytes: &str) -> UnixStream {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let permit = timeout(LONG, places.clone().acquire_owned()).await;
        let permit = permit.expect("a place is free in time").unwrap();
        let seat = Arc::new(Seat::new(permit, &ours).unwrap());
        tokio::spawn(converse(server.clone(), ours, seat, Whose::Operator));
        theirs.write_all(bytes.as_bytes()).await.unwrap();
        theirs
    }

    /// The beginning of the answer.
    pub async fn status(client: &mut UnixStream) -> String {
        let mut head = [0; 12];
        timeout(LONG, client.read_exact(&mut head)).await.expect("an answer in time").unwrap();
        String::from_utf8_lossy(&head).into_owned()
    }

    #[tokio::test]
    async fn no_file_but_a_dead_servers_socket_is_replaced() {
        let place = tempfile::tempdir().unwrap();
        let [path, link] = ["socket", "link"].map(|name| place.path().join(name));
        std::os::unix::fs::symlink(&path, &link).unwrap();
        fs::write(&path, "kept").unwrap();
        for path in [&path, &link, &place.path().to_owned()] {
            let refused = bind(path).await.map(drop).unwrap_err();
            assert!(matches!(refused, ServeError::NoSocket(_)), "{refused}");
        }
        assert_eq!(fs::read(&link).unwrap(), b"kept");
        fs::remove_file(&path).unwrap();
        let alive = bind(&path).await.unwrap();
        assert!(alive.own.is_some() && file_at(&path) == alive.own);
        assert!(matches!(bind(&path).await, Err(ServeError::Taken(_))));
        assert!(matches!(bind(&link).await, Err(ServeError::Taken(_))));
        drop(alive);
        let alive = bind(&path).await.unwrap();
        assert!(alive.own.is_some() && file_at(&path) == alive.own);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        // Nothing else is left.
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2);
    }

    #[test]
    fn bodies_that_come_slowly_hold_up_no_other_call() {
        // Of its pool of threads there is one, instead of 512.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .worker_threads(2)
            .max_blocking_threads(1)
            .build()
            .unwrap();
        runtime.block_on(async {
            let root = tempfile::tempdir().unwrap();
            let server = server(root.path());
            let places = Arc::new(Semaphore::new(8));
            let slow =
                "POST /images/load HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n0123456789";
            let mut held = Vec::new();
            for _ in 0..4 {
                held.push(say(&server, &places, slow).await);
            }
            for _ in 0..4 {
                // Their bodies are waited for by now, or after the next answer.
                let line = "GET /containers/quiet/json HTTP/1.1\r\nHost: x\r\n\r\n";
                let mut client = say(&server, &places, line).await;
                assert_eq!(status(&mut client).await, "HTTP/1.1 200");
            }
        });
        runtime.shutdown_background();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn clients_that_went_away_give_their_places_back() {
        let root = tempfile::tempdir().unwrap();
        let server = server(root.path());
        let places = Arc::new(Semaphore::new(4));
        let upgrade = "Connection: Upgrade\r\nUpgrade: tcp\r\n";
        for (line, more) in [
            ("GET /events", ""),
            ("POST /containers/quiet/wait?condition=next-exit", ""),
            ("POST /containers/quiet/wait?condition=removed", ""),
            ("POST /containers/quiet/attach?stream=1&stdout=1", ""),
            ("POST /containers/quiet/attach?stream=1&stdout=1", upgrade),
            ("POST /containers/quiet/attach?stream=1&stdin=1&stdout=1", upgrade),
        ] {
            let request = format!("{line} HTTP/1.1\r\nHost: x\r\n{more}\r\n");
            for _ in 0..12 {
                let mut client = say(&server, &places, &request).await;
                let status = status(&mut client).await;
                assert!(status.ends_with("200") || status.ends_with("101"), "{line}: {status}");
            }
            let all = timeout(LONG, places.acquire_many(4)).await;
            assert!(all.is_ok(), "{line}: a place was not given back");
        }
    }
}
