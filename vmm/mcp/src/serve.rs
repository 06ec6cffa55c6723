//! The server's life: it listens, and its sandboxes end with it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use exocell_cell::images::private;
use exocell_cell::{Layout, key};
use rmcp::ServiceExt;
use rmcp::transport::stdio;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use crate::error::ServeError;
use crate::http;
use crate::sandbox::{Recipe, Sandboxes};
use crate::tools::Tools;

/// What a server is started with.
#[derive(Debug, Clone)]
pub struct Options {
    pub layout: Layout,
    /// The command itself.
    pub executable: PathBuf,
    /// Images that a client may name; the first where it names none.
    pub images: Vec<String>,
    /// For `exocell run`: what sandboxes may do.
    pub flags: Vec<String>,
    /// Sandboxes at once.
    pub sandboxes_max: usize,
    pub door: Door,
}

/// How clients come.
#[derive(Debug, Clone)]
pub enum Door {
    /// One, by standard input and output.
    Stdio,
    /// Any that has the key, by HTTP at this address. `key` is its file, `ROOT/mcp/key` where
    /// none is named.
    Http { address: String, key: Option<PathBuf> },
}

/// Serves until the client of standard input is gone, or a signal comes; then no sandbox is left.
/// `ready` hears where clients may come, and where the key is.
///
/// # Errors
/// The host's, and a client that does not begin as the protocol says.
pub fn serve(options: Options, ready: impl FnOnce(SocketAddr, &Path)) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .worker_threads(2)
        .thread_name("mcp")
        .build()
        .map_err(ServeError::host("cannot start threads"))?;
    let served = runtime.block_on(run(options, ready));
    // A read of standard input is not waited for.
    runtime.shutdown_background();
    served
}

async fn run(options: Options, ready: impl FnOnce(SocketAddr, &Path)) -> Result<(), ServeError> {
    let sandboxes = Sandboxes::new(Recipe {
        layout: options.layout.clone(),
        executable: options.executable,
        images: options.images,
        flags: options.flags,
        sandboxes_max: options.sandboxes_max,
    });
    let tools = Tools::new(sandboxes.clone());
    let failed = |error| ServeError::host("cannot wait for signals")(error);
    let mut term = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let served = async {
        match options.door {
            Door::Stdio => converse(tools).await,
            Door::Http { address, key } => {
                let (listener, key) = listen(&options.layout, &address, key, ready).await?;
                http::serve(listener, tools, key).await;
                Ok(())
            }
        }
    };
    let ended = tokio::select! {
        _ = term.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
        ended = served => ended,
    };
    sandboxes.end().await;
    ended
}

async fn converse(tools: Tools) -> Result<(), ServeError> {
    let begun = tools.serve(stdio()).await;
    let service = begun.map_err(|error| ServeError::Client(error.to_string()))?;
    // However it ended, it has.
    let _ = service.waiting().await;
    Ok(())
}

async fn listen(
    layout: &Layout,
    address: &str,
    key: Option<PathBuf>,
    ready: impl FnOnce(SocketAddr, &Path),
) -> Result<(TcpListener, key::Key), ServeError> {
    let path = match key {
        Some(path) => path,
        None => {
            let folder = layout.root().join("mcp");
            let failed = ServeError::host(format!("cannot use {}", folder.display()));
            private::folder(&folder).map_err(failed)?;
            folder.join("key")
        }
    };
    let key = key::read_or_make(layout, &path)?;
    let listener = TcpListener::bind(address).await;
    let listener = listener.map_err(ServeError::host(format!("cannot listen at {address}")))?;
    let at = listener.local_addr().map_err(ServeError::host("cannot listen"))?;
    ready(at, &path);
    Ok((listener, key))
}
