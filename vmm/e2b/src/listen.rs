//! The address, its connections, and the server's end.

use std::convert::Infallible;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use exocell_cell::images::private;
use exocell_cell::logging::tracing::{debug, info, warn};
use exocell_cell::now_ms;
use exocell_door::{Door, Seat, Work};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::address::{self, Address};
use crate::bounds::Bounds;
use crate::builds::Builds;
use crate::envd::signature::Signed;
use crate::envd::{self, PORT};
use crate::error::{Problem, ServeError};
use crate::http::{Call, Response, refusal, sent};
use crate::keys::Keys;
use crate::note::Notes;
use crate::options::Options;
use crate::pool;
use crate::proxy;
use crate::route::route;
use crate::sandbox::Sandbox;
use crate::state::Server;

/// Connections at once; for who comes then another goes ([`exocell_door`]).
const CONNECTIONS_MAX: usize = 2048;
/// Descriptors for each: its own, and what its call opens.
const DESCRIPTORS: u64 = 4;
/// How long a client may take to send its first request's head.
const FIRST_HEAD_MAX: Duration = Duration::from_secs(20);
/// How long it may take to send another request: longer than clients keep a connection that they
/// do not use.
const HEAD_TIME_MAX: Duration = Duration::from_secs(320);
/// How often it is looked for what nobody has come back for.
const TIDY_TIME: Duration = Duration::from_secs(60);
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
    let connections = connections();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(2)
        .thread_name("e2b")
        .build()
        .map_err(ServeError::host("cannot start threads"))?;
    let served = runtime.block_on(run(options, connections, ready));
    // Clients that still stream do not hold the end up.
    runtime.shutdown_background();
    served
}

/// As many connections as there are descriptors for.
fn connections() -> usize {
    let wanted = DESCRIPTORS * CONNECTIONS_MAX as u64;
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return CONNECTIONS_MAX };
    let most = soft.max(hard.min(wanted));
    let have = if setrlimit(Resource::RLIMIT_NOFILE, most, hard).is_ok() { most } else { soft };
    (have.min(wanted) / DESCRIPTORS).max(1) as usize
}

async fn run(
    options: Options,
    connections: usize,
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
        Some(path) => (Keys::read(&options.layout, path, &options.defaults.connect)?, None),
        None => Keys::only(&root).map(|(keys, path)| (keys, Some(path)))?,
    };
    let notes = Notes::open(root.join("sandboxes")).map_err(failed())?;
    let place = options.address.clone();
    let listener = TcpListener::bind(&place).await;
    let listener = listener.map_err(ServeError::host(format!("cannot listen at {place}")))?;
    let at = listener.local_addr().map_err(ServeError::host("cannot listen"))?;
    let options = Options { port: at.port(), ..options };
    let (options, bounds) = (Arc::new(options), Arc::new(Bounds::new(connections)));
    let builds =
        Builds::new(&options, &bounds).map_err(ServeError::host("cannot prepare builds"))?;
    let server = Arc::new(Server::new(options, keys, notes, builds, bounds));
    let layout = server.layout().clone();
    // What cannot be swept is tried by the next server.
    let _ = tokio::task::spawn_blocking(move || pool::sweep(&layout)).await;
    server.adopt_all().await;
    tokio::spawn(tidy(server.builds.clone()));
    tokio::spawn(pool::keep(server.clone()));
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

async fn tidy(builds: Arc<Builds>) {
    loop {
        builds.tidy().await;
        tokio::time::sleep(TIDY_TIME).await;
    }
}

async fn accept(server: &Arc<Server>, listener: &TcpListener) {
    let door = Door::new(server.bounds.connections);
    loop {
        let (seat, line) = door.next(listener).await;
        tokio::spawn(converse(server.clone(), seat, line));
    }
}

async fn converse(
    server: Arc<Server>,
    seat: Arc<Seat>,
    line: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) {
    let has_asked = Arc::new(AtomicBool::new(false));
    let (own, asks) = (seat.clone(), has_asked.clone());
    let service = service_fn(move |request| {
        asks.store(true, Ordering::Relaxed);
        let (server, work) = (server.clone(), Work::new(&own));
        async move { Ok::<_, Infallible>(answer(&server, request, work).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(line), service)
        .with_upgrades();
    let is_late = async {
        tokio::time::sleep(FIRST_HEAD_MAX).await;
        if has_asked.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    let mut connection = pin!(connection);
    tokio::select! {
        ended = &mut connection => {
            // An answer that was begun and has no end: the sandbox is gone, or its program. What a
            // client broke off is its own affair.
            if ended.is_err_and(|error| error.is_user()) {
                seat.break_off();
            }
        }
        () = seat.told_to_go() => {}
        () = is_late => {}
    }
}

async fn answer(
    server: &Arc<Server>,
    request: hyper::Request<Incoming>,
    work: Arc<Work>,
) -> Response {
    let (begun, method) = (Instant::now(), request.method().clone());
    let path = request.uri().path().to_owned();
    let domain = server.options.domain.as_deref();
    let host = request.uri().host().map(str::to_owned);
    let response = match address::of(request.headers(), host.as_deref(), domain) {
        // Nobody but its client wants what a program says.
        Some(Address { id, port }) if port != PORT => tokio::select! {
            response = visit(server, &id, port, request, &work) => response,
            () = work.gone() => refusal(&Problem::canceled("the client is gone")),
        },
        address => {
            let call = Call::of(request, &server.bounds, &work);
            // On a task of its own: a client that hangs up does not stop a call half way.
            let (server, work) = (server.clone(), work.clone());
            let answered = tokio::spawn(async move {
                let response = dispatch(&server, address, call).await;
                drop(work);
                response
            });
            answered.await.unwrap_or_else(|_| refusal(&Problem::internal("the call failed")))
        }
    };
    let (status, took_us) = (response.status().as_u16(), begun.elapsed().as_micros() as u64);
    match status {
        500 | 503 => warn!(%method, path, status, took_us, "answered"),
        _ => debug!(%method, path, status, took_us, "answered"),
    }
    let response = sent(response, &work, &server.bounds);
    // What has nothing to say for long is to hear that nobody listens.
    response.map(|body| body.until(async move { work.gone().await }))
}

/// Has the program at `port` of a sandbox answer.
async fn visit(
    server: &Arc<Server>,
    id: &str,
    port: u16,
    request: hyper::Request<Incoming>,
    work: &Arc<Work>,
) -> Response {
    let Some(sandbox) = server.get_begun(id) else { return proxy::no_sandbox(id) };
    if port == 0 {
        return refusal(&Problem::invalid("E2b-Sandbox-Port is no port"));
    }
    if let Err(problem) = proxy::admit(&sandbox, &request, work) {
        return refusal(&problem);
    }
    if sandbox.is_paused() {
        // To its end, whoever wants it.
        let (own, server) = (sandbox.clone(), server.clone());
        let woken = tokio::spawn(async move { wake(&server, &own).await });
        if !woken.await.unwrap_or(false) {
            return proxy::no_sandbox(id);
        }
    }
    proxy::pass(sandbox, port, request, work).await
}

async fn dispatch(server: &Arc<Server>, address: Option<Address>, call: Call) -> Response {
    let Some(Address { id, .. }) = address else {
        if let Some(sandbox) = signer(server, &call) {
            return envd::serve(server, sandbox, call).await;
        }
        return route(server, call).await.unwrap_or_else(|problem| refusal(&problem));
    };
    let Some(sandbox) = server.get_begun(&id) else { return proxy::no_sandbox(&id) };
    if sandbox.is_paused() && !wake(server, &sandbox).await {
        return proxy::no_sandbox(&id);
    }
    envd::serve(server, sandbox, call).await
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
    // Whoever has no key may ask: it costs little, however many sandboxes there are.
    let wanted = Signed::read(&call.query, operation)?.wanted()?;
    server.all().into_iter().find(|it| it.has_begun() && it.has_signed(&wanted))
}
