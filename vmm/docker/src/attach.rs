//! `POST /containers/{id}/attach`, and a container's terminal.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use exocell_cell::lines::Wanted;
use hyper::StatusCode;

use crate::error::ApiResult;
use crate::frames::Chunk;
use crate::hijack::{self, Feed, Hijacked, Listener, Offer};
use crate::http::{Call, Response, empty};
use crate::keys::Keys;
use crate::lifecycle;
use crate::live::Live;
use crate::logs::Past;
use crate::state::Server;
use tokio::sync::mpsc::Receiver;
use tokio::sync::watch;
use tokio::time::timeout;

/// How long the last words of a client that is gone may take to be read.
const LAST_WORDS_MAX: Duration = Duration::from_secs(10);

/// A container's own standard input.
struct Stdin {
    live: Arc<Live>,
    /// Whether the client's end is the input's too.
    ends: bool,
}

impl Feed for Stdin {
    async fn feed(&self, bytes: Option<Bytes>) -> bool {
        match bytes {
            Some(bytes) => self.live.stdin(bytes).await,
            None if self.ends => self.live.stdin_eof().await,
            None => {}
        }
        true
    }
}

/// What a client wants of a container.
struct Wish {
    stdin: bool,
    stdout: bool,
    stderr: bool,
    /// What it presses to leave a terminal.
    keys: Option<Keys>,
}

/// Attaches a client: before the container is started, so that it misses
/// nothing, or while it runs.
pub async fn attach(server: &Arc<Server>, key: &str, mut call: Call) -> ApiResult<Response> {
    let seen = server.find(key).await?;
    let live = server.live(seen.id());
    let query = call.target.query.clone();
    if seen.is_running() {
        // One that is just ending has nothing more to say.
        let _ = lifecycle::adopt(server, &seen).await;
    }
    let config = &seen.container.config;
    let wish = Wish {
        stdin: query.flag("stdin") && config.open_stdin,
        stdout: query.flag("stdout"),
        stderr: query.flag("stderr"),
        keys: config
            .tty
            .then(|| hijack::keys(query.get("detachKeys").unwrap_or("")))
            .transpose()?,
    };
    // One that has ended may be started again.
    let waits = seen.cell.is_none() || !seen.is_running() && seen.container.goes_on().is_ok();
    let output = live.attach(waits);
    let past = match (query.flag("logs"), &seen.cell) {
        (true, Some((record, _))) if !seen.container.spec.keeps_no_log => {
            let wanted = Wanted::streams(wish.stdout, wish.stderr);
            Some(Past::open(server, record.directory(), wanted).await?)
        }
        _ => None,
    };
    let past = past.map(|past| (server.clone(), past));
    server.tell(&seen.container, "attach", &[]);
    let stdin = Arc::new(Stdin { live, ends: config.stdin_once && !config.tty });
    let output = if query.flag("stream") { Some(output) } else { None };
    let (response, client) = Offer::of(&mut call).accept(config.tty);
    tokio::spawn(async move {
        if let Some(client) = client.await {
            serve(client, wish, past, output, stdin).await;
        }
    });
    Ok(response)
}

async fn serve(
    client: Hijacked,
    wish: Wish,
    past: Option<(Arc<Server>, Past)>,
    output: Option<Receiver<Chunk>>,
    stdin: Arc<Stdin>,
) {
    let (input, mut listener) = client.into_split();
    if let Some((server, mut past)) = past
        && !recall(&server, &mut past, &mut listener).await
    {
        return;
    }
    let live = stdin.live.clone();
    let (leaves, mut left) = watch::channel(false);
    let keys = wish.keys.clone();
    let feed = || {
        tokio::spawn(async move {
            // What a client says before the start is kept for the program.
            stdin.live.until_followed().await;
            if hijack::feed(input, stdin, keys).await {
                leaves.send_replace(true);
            }
        })
    };
    let feeder = (wish.stdin && output.is_some()).then(feed);
    let heard = match output {
        Some(output) => tokio::select! {
            heard = tell(output, &wish, &mut listener) => heard,
            () = hijack::left(&mut left) => true,
        },
        None => true,
    };
    listener.end().await;
    if let Some(mut feeder) = feeder {
        if !heard && live.is_followed() {
            // What a client said before it went is in the socket still.
            let _ = timeout(LAST_WORDS_MAX, &mut feeder).await;
        }
        feeder.abort();
    }
}

/// Tells what the program wrote. False when the client is gone before that is over.
async fn recall(server: &Arc<Server>, past: &mut Past, listener: &mut Listener) -> bool {
    while let Ok(chunks) = past.next(server).await {
        if chunks.is_empty() {
            return true;
        }
        for chunk in chunks {
            if !listener.say(&chunk).await {
                return false;
            }
        }
    }
    // A log that cannot be read tells nothing.
    true
}

/// Tells what the program writes. False when the client is gone before that is over.
async fn tell(mut output: Receiver<Chunk>, wish: &Wish, listener: &mut Listener) -> bool {
    let place = listener.place();
    loop {
        let chunk = tokio::select! {
            chunk = output.recv() => chunk,
            () = place.gone() => return false,
        };
        let Some(chunk) = chunk else { return true };
        let wanted = if chunk.stderr { wish.stderr } else { wish.stdout };
        if wanted && !listener.say(&chunk).await {
            return false;
        }
    }
}

/// `POST /containers/{id}/resize`: of one that does not run, the terminal of its next program.
pub async fn resize(server: &Arc<Server>, key: &str, call: &Call) -> ApiResult<Response> {
    let size = hijack::wanted_size(call)?;
    let live = server.live(server.find(key).await?.id());
    let changing = live.changing.lock().await;
    let seen = server.find(&live.id).await?;
    if !seen.is_running() {
        let noted = server.blocking(move |server| {
            let mut container = seen.container;
            container.tty_size = Some((size.rows, size.cols));
            server.containers.write(&container)
        });
        noted.await?;
        return Ok(empty(StatusCode::OK));
    }
    drop(changing);
    lifecycle::adopt(server, &seen).await?;
    live.resize(size);
    Ok(empty(StatusCode::OK))
}
