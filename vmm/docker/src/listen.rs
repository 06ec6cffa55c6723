//! The socket, its connections, and the server's end.

use std::convert::Infallible;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use exocell_cell::Layout;
use exocell_cell::images::private;
use hyper::body::Incoming;
use hyper::header::{HeaderValue, SERVER, UPGRADE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;

use crate::admit::Defaults;
use crate::containers::Containers;
use crate::error::{ApiError, ApiResult, ServeError};
use crate::http::{Call, Inlet, Place, Response, failed};
use crate::lifecycle;
use crate::route::route;
use crate::state::Server;
use crate::target::{Target, VERSION_MAX};

/// Connections at once.
const CONNECTIONS_MAX: usize = 1024;
/// How long a client may take to send a request's head, or to send another
/// request.
const HEAD_TIME_MAX: Duration = Duration::from_secs(300);
/// The longest name of a socket's file, with its scheme, that is told of another server.
const SOCKET_BYTES_MAX: u64 = 4 << 10;
/// The longest head, in bytes.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// What a server is started with.
#[derive(Debug, Clone)]
pub struct Options {
    pub layout: Layout,
    pub socket: PathBuf,
    pub defaults: Defaults,
}

/// Serves until SIGTERM or SIGINT. The cells go on; `ready` is called when
/// clients may come.
///
/// # Errors
/// The socket or the state root cannot be used, or another server has one.
pub fn serve(options: &Options, ready: impl FnOnce()) -> Result<(), ServeError> {
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

async fn run(options: &Options, ready: impl FnOnce()) -> Result<(), ServeError> {
    let root = Containers::root(&options.layout);
    let failed = || format!("cannot use {}", root.display());
    private::folder(&root).map_err(ServeError::host(failed()))?;
    let _lock = lock(options)?;
    let containers = Containers::open(&options.layout).map_err(ServeError::host(failed()))?;
    let listener = bind(&options.socket).await?;
    let server = Arc::new(Server::new(containers, options.defaults.clone()));
    adopt_all(&server).await;
    let failed = |error| ServeError::host("cannot wait for signals")(error);
    let mut term = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    ready();
    tokio::select! {
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
        () = accept(&server, &listener) => {}
    }
    // Somebody may have removed it, or put another there.
    let _ = fs::remove_file(&options.socket);
    Ok(())
}

/// One server for a state root. The file that it holds says where it listens.
fn lock(options: &Options) -> Result<File, ServeError> {
    let path = Containers::root(&options.layout).join("lock");
    let what = || format!("cannot lock {}", path.display());
    let failed = || ServeError::host(what());
    let mut how = private::options();
    let file = how.create(true).truncate(false).read(true).write(true).open(&path);
    let mut file = file.map_err(failed())?;
    match file.try_lock() {
        Ok(()) => {
            let said = format!("unix://{}\n", options.socket.display());
            file.set_len(0).and_then(|()| file.write_all(said.as_bytes())).map_err(failed())?;
            Ok(file)
        }
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

/// Listens at `socket`, for its owner only. A socket that nobody listens on is
/// a dead server's, and replaced.
async fn bind(socket: &Path) -> Result<UnixListener, ServeError> {
    let shown = socket.display().to_string();
    if UnixStream::connect(socket).await.is_ok() {
        return Err(ServeError::Taken(shown));
    }
    let is_socket =
        |data: fs::Metadata| std::os::unix::fs::FileTypeExt::is_socket(&data.file_type());
    if fs::symlink_metadata(socket).is_ok_and(is_socket) {
        let removed = fs::remove_file(socket);
        removed.map_err(ServeError::host(format!("cannot replace {shown}")))?;
    }
    let failed = || ServeError::host(format!("cannot listen on {shown}"));
    // Under another name until only its owner can connect.
    let name = socket.file_name().unwrap_or_default().to_string_lossy();
    let new = socket.with_file_name(format!(".{name}.new"));
    let _ = fs::remove_file(&new);
    let listener = UnixListener::bind(&new).map_err(failed())?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600))
        .and_then(|()| fs::rename(&new, socket))
        .map_err(failed())?;
    Ok(listener)
}

/// Follows what runs already, and finds out what is over.
async fn adopt_all(server: &Arc<Server>) {
    let all = server.blocking(|server| server.containers.all()).await.unwrap_or_default();
    for mut seen in all {
        if seen.is_running() {
            // One that is just ending needs no follower.
            let _ = lifecycle::adopt(server, &seen).await;
        }
        if seen.cell.is_some() && !seen.container.started {
            // The last server died between the cell's launch and this note.
            seen.container.started = true;
            let _ = server.blocking(move |s| s.containers.write(&seen.container)).await;
        }
    }
}

async fn accept(server: &Arc<Server>, listener: &UnixListener) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(converse(server.clone(), stream, Arc::new(place)));
            }
            // Out of descriptors: some will be free again.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn converse(server: Arc<Server>, stream: UnixStream, place: Place) {
    let service = service_fn(move |request| {
        let (server, place) = (server.clone(), place.clone());
        async move { Ok::<_, Infallible>(answer(&server, request, place).await) }
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

async fn answer(server: &Arc<Server>, request: hyper::Request<Incoming>, place: Place) -> Response {
    let result = try_answer(server, request, place).await;
    let mut response = result.unwrap_or_else(|error| failed(&error));
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
) -> ApiResult<Response> {
    let target = Target::parse(request.uri().path(), request.uri().query())?;
    let upgrade = hyper::upgrade::on(&mut request);
    let (head, body) = request.into_parts();
    let wants_upgrade = head.headers.contains_key(UPGRADE);
    let (headers, upgrade) = (head.headers, Some(upgrade));
    let body = Inlet::new(body);
    let call = Call { target, headers, body, upgrade, wants_upgrade, place };
    // On a task of its own: a client that hangs up does not stop a call half way.
    let (server, method) = (server.clone(), head.method);
    let answered = tokio::spawn(async move { route(&server, method.as_str(), call).await });
    answered.await.unwrap_or_else(|_| Err(ApiError::internal("the call failed")))
}
