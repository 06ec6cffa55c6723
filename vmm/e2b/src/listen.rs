//! The address, its connections, and the server's end.

use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use exocell_cell::images::private;
use exocell_cell::logging::tracing::{debug, info, warn};
use exocell_cell::now_ms;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::address::{self, Address};
use crate::builds::Builds;
use crate::envd::signature::Signed;
use crate::envd::{self, PORT};
use crate::error::{Problem, ServeError};
use crate::http::{Call, Inlet, Query, Response, refusal};
use crate::keys::Keys;
use crate::note::Notes;
use crate::options::Options;
use crate::proxy;
use crate::route::route;
use crate::sandbox::Sandbox;
use crate::state::Server;

/// Connections at once; who comes then waits.
const CONNECTIONS_MAX: usize = 1024;
/// Descriptors for that: one each, and as many for what calls open.
const DESCRIPTORS: u64 = 4 * CONNECTIONS_MAX as u64;
/// How long a client may take to send a request's head, or to send another request: longer than
/// clients keep a connection that they do not use.
const HEAD_TIME_MAX: Duration = Duration::from_secs(320);
/// The longest head, in bytes.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Serves until SIGTERM or SIGINT. The sandboxes go on; `ready` is called when clients may come,
/// with the address, and where the key is if the server has one of its own.
///
/// # Errors
/// The address or the state root cannot be used, or another server has them.
pub fn serve(
    options: Options,
    ready: impl FnOnce(SocketAddr, Option<&Path>),
) -> Result<(), ServeError> {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // With fewer some clients wait longer.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(DESCRIPTORS)), hard);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(2)
        .thread_name("e2b")
        .build()
        .map_err(ServeError::host("cannot start threads"))?;
    let served = runtime.block_on(run(options, ready));
    // Clients that still stream do not hold the end up.
    runtime.shutdown_background();
    served
}

async fn run(
    options: Options,
    ready: impl FnOnce(SocketAddr, Option<&Path>),
) -> Result<(), ServeError> {
    let root = options.layout.root().join("e2b");
    let shown = root.display().to_string();
    let failed = || ServeError::host(format!("cannot use {shown}"));
    private::folder(&root).map_err(failed())?;
    let mut how = private::options();
    let lock = how.create(true).truncate(false).write(true).open(root.join("lock"));
    let lock = lock.map_err(failed())?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(fs::TryLockError::WouldBlock) => {
            return Err(ServeError::RootTaken(options.layout.root().display().to_string()));
        }
        Err(fs::TryLockError::Error(error)) => return Err(failed()(error)),
    }
    let (keys, key) = match &options.keys {
        Some(path) => (Keys::read(path, &options.defaults.connect)?, None),
        None => Keys::only(&root).map(|(keys, path)| (keys, Some(path)))?,
    };
    let notes = Notes::open(root.join("sandboxes")).map_err(failed())?;
    let place = options.address.clone();
    let listener = TcpListener::bind(&place).await;
    let listener = listener.map_err(ServeError::host(format!("cannot listen at {place}")))?;
    let at = listener.local_addr().map_err(ServeError::host("cannot listen"))?;
    let options = Options { port: at.port(), ..options };
    let builds = Builds::new().map_err(ServeError::host("no random bytes"))?;
    let server = Arc::new(Server::new(options, keys, notes, builds));
    server.adopt_all().await;
    let failed = |error| ServeError::host("cannot wait for signals")(error);
    let mut term = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    info!(address = %at, root = %server.layout().root().display(), "serves");
    ready(at, key.as_deref());
    tokio::select! {
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
        () = accept(&server, &listener) => {}
    }
    info!(address = %at, "ends; the sandboxes go on");
    drop(lock);
    Ok(())
}

async fn accept(server: &Arc<Server>, listener: &TcpListener) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let _ = stream.set_nodelay(true);
                tokio::spawn(converse(server.clone(), stream, place));
            }
            // Out of descriptors: some will be free again.
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn converse(server: Arc<Server>, stream: TcpStream, place: OwnedSemaphorePermit) {
    let service = service_fn(move |request| {
        let server = server.clone();
        async move { Ok::<_, Infallible>(answer(&server, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    // What a client broke off is its own affair.
    let _ = connection.await;
    drop(place);
}

async fn answer(server: &Arc<Server>, request: hyper::Request<Incoming>) -> Response {
    let (begun, method) = (Instant::now(), request.method().clone());
    let path = request.uri().path().to_owned();
    // On a task of its own: a client that hangs up does not stop a call half way.
    let own = server.clone();
    let answered = tokio::spawn(async move { dispatch(&own, request).await }).await;
    let response = answered.unwrap_or_else(|_| refusal(&Problem::internal("the call failed")));
    let (status, took_us) = (response.status().as_u16(), begun.elapsed().as_micros() as u64);
    match status {
        500 | 503 => warn!(%method, path, status, took_us, "answered"),
        _ => debug!(%method, path, status, took_us, "answered"),
    }
    response
}

async fn dispatch(server: &Arc<Server>, request: hyper::Request<Incoming>) -> Response {
    let domain = server.options.domain.as_deref();
    let host = request.uri().host().map(str::to_owned);
    let Some(Address { id, port }) = address::of(request.headers(), host.as_deref(), domain) else {
        let call = call(request);
        if let Some(sandbox) = signer(server, &call) {
            return envd::serve(server, sandbox, call).await;
        }
        return route(server, call).await.unwrap_or_else(|problem| refusal(&problem));
    };
    let Some(sandbox) = server.get(&id) else { return proxy::no_sandbox(&id) };
    if sandbox.is_paused() && !wake(server, &sandbox).await {
        return proxy::no_sandbox(&id);
    }
    match port {
        PORT => envd::serve(server, sandbox, call(request)).await,
        0 => refusal(&Problem::invalid("E2b-Sandbox-Port is no port")),
        port => proxy::pass(sandbox, port, request).await,
    }
}

/// Lets a paused sandbox go on if it is one that calls wake up.
async fn wake(server: &Arc<Server>, sandbox: &Arc<Sandbox>) -> bool {
    let note = sandbox.note();
    if !note.auto_resume {
        return false;
    }
    // As long as it had when it was made, or was last given.
    let given = note.paused_ms.unwrap_or(now_ms()).max(note.started_ms);
    let rest = note.deadline_ms.saturating_sub(given).max(server.options.timeout_default_ms());
    server.resume(sandbox, now_ms() + rest).await.is_ok()
}

/// The sandbox that has signed the URL of a file which names none.
fn signer(server: &Server, call: &Call) -> Option<Arc<Sandbox>> {
    if call.path != "/files" {
        return None;
    }
    let operation = if call.method == hyper::Method::GET { "read" } else { "write" };
    let signed = Signed::read(&call.query, operation)?;
    server.all().into_iter().find(|it| !it.is_paused() && signed.is_by(&it.note().access_token))
}

fn call(request: hyper::Request<Incoming>) -> Call {
    let (head, body) = request.into_parts();
    Call {
        method: head.method,
        path: head.uri.path().to_owned(),
        query: Query::read(head.uri.query().unwrap_or_default()),
        headers: head.headers,
        body: Inlet::new(body),
    }
}
