//! The server's life: its address, its connections, and its end.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use exocell_cell::{Layout, key};
use exocell_door::{Door, Seat, Work};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::error::ServeError;
use crate::gate::Gate;
use crate::route::Server;

/// Connections at once; for who comes then another goes ([`exocell_door`]).
const CONNECTIONS_MAX: usize = 128;
/// How long a browser may take to send the head of a request, and the longest head.
const HEAD_TIME: Duration = Duration::from_secs(20);
const HEAD_BYTES_MAX: usize = 32 << 10;

/// What a server is started with.
#[derive(Debug, Clone)]
pub struct Options {
    pub layout: Layout,
    pub address: String,
    /// The file of the key, which is made where there is none. Without one a key is made for this
    /// server alone, and others than this host's own programs may not reach it.
    pub key: Option<PathBuf>,
    /// Names by which browsers come, beside addresses and `localhost`.
    pub hosts: Vec<String>,
}

/// Where the key is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// Nowhere but here.
    Own(String),
    File(PathBuf),
}

/// Serves until SIGTERM or SIGINT. `ready` hears where browsers may come, and where the key is.
///
/// # Errors
/// The address cannot be used, or needs a key; the key cannot be kept.
pub fn serve(options: Options, ready: impl FnOnce(SocketAddr, &Key)) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(2)
        .thread_name("ui")
        .build()
        .map_err(ServeError::host("cannot start threads"))?;
    let served = runtime.block_on(run(options, ready));
    // Pages that are open do not hold the end up.
    runtime.shutdown_background();
    served
}

async fn run(options: Options, ready: impl FnOnce(SocketAddr, &Key)) -> Result<(), ServeError> {
    let listener = TcpListener::bind(&options.address).await;
    let failed = || ServeError::host(format!("cannot listen at {}", options.address));
    let listener = listener.map_err(failed())?;
    let at = listener.local_addr().map_err(failed())?;
    let (key, told) = match options.key {
        Some(path) => (key::read_or_make(&options.layout, &path)?, Key::File(path)),
        None if at.ip().is_loopback() => {
            let own = key::random().map_err(ServeError::host("cannot make a key"))?;
            (key::Key::of(&own), Key::Own(own))
        }
        None => return Err(ServeError::Open(options.address)),
    };
    let gate = Gate { key, hosts: options.hosts };
    let server = Arc::new(Server::new(options.layout, gate));
    let failed = |error| ServeError::host("cannot wait for signals")(error);
    let mut term = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    tokio::spawn(server.watch.clone().look());
    ready(at, &told);
    tokio::select! {
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
        () = accept(&server, &listener) => {}
    }
    Ok(())
}

async fn accept(server: &Arc<Server>, listener: &TcpListener) {
    let door = Door::new(CONNECTIONS_MAX);
    loop {
        let (seat, line) = door.next(listener).await;
        tokio::spawn(converse(server.clone(), seat, line));
    }
}

async fn converse(
    server: Arc<Server>,
    seat: Arc<Seat>,
    line: impl AsyncRead + AsyncWrite + Unpin + Send,
) {
    let own = seat.clone();
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let (server, work) = (server.clone(), Work::new(&own));
        async move {
            // Of whoever has the key the connection stays, as long as a stream on it does.
            let reply = server.answer(request, &work).await;
            Ok::<_, Infallible>(reply.map(|words| words.keeping(work)))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(line), service);
    tokio::select! {
        // What a browser broke off is its own affair.
        _ = connection => {}
        () = seat.told_to_go() => {}
    }
}
