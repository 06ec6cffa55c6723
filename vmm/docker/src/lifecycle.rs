//! Starting, following and ending containers.

pub mod restarts;

use std::os::unix::net::UnixStream as BlockingStream;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use exocell_cell::agent::{FailureKind, Kind, Reply, TtySize};
use exocell_cell::control::{Client, ControlRequest};
use exocell_cell::network::Publish;
use exocell_cell::signal::Signal;
use exocell_cell::{CellError, Record, end, warm};
use hyper::StatusCode;
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::containers::{Container, Seen};
use crate::error::{ApiError, ApiResult};
use crate::frames::{Chunk, read_frame};
use crate::health;
use crate::launcher::{self, Start};
use crate::live::{Live, Overseer};
use crate::starts;
use crate::state::Server;
use crate::volumes;

/// What a killed cell's exit code is.
const KILLED: u8 = 128 + 9;
/// How long a program gets to end where nobody says.
const STOP_SECONDS: i64 = 10;

/// How often and how soon a container whose guest has broken off is looked at.
const ENDING_LOOKS: u32 = 40;
const ENDING_LOOK: Duration = Duration::from_millis(50);
/// How long those who read or write a container's files have to be done before it is started.
pub const READERS_PATIENCE: Duration = Duration::from_secs(5);

type Started = oneshot::Sender<ApiResult<()>>;

/// Starts container `key` and waits until its program runs. False when it runs
/// already.
///
/// # Errors
/// 400 when the program cannot be executed, in words that clients know.
pub async fn start(server: &Arc<Server>, key: &str) -> ApiResult<bool> {
    let id = server.find(key).await?.id().to_owned();
    let started = begin(server, &id).await;
    // One that removes itself does so without having run, too: its client waits for that.
    if started.is_err() && server.find(&id).await.is_ok_and(|seen| seen.container.spec.remove) {
        remove(server, &id, true, true).await?;
    }
    started
}

async fn begin(server: &Arc<Server>, key: &str) -> ApiResult<bool> {
    let live = server.live(server.find(key).await?.id());
    let _changing = live.claim(READERS_PATIENCE).await;
    let seen = server.find(&live.id).await?;
    // As docker has it: one that is about to start again by itself is started.
    if seen.is_running() || seen.is_restarting() {
        return Ok(false);
    }
    if let Some((record, _)) = seen.cell {
        seen.container.goes_on()?;
        // Who heard of the end may be faster than the supervisor's own.
        let released = move |_: &Server| {
            record.end_restarter()?;
            record.await_release();
            Ok(())
        };
        server.blocking(released).await?;
    }
    let mut starting = seen.container;
    starting.spec.restarts = 0;
    let launched = server.blocking(move |server| launch(server, starting)).await;
    // Who was attached before hears that there will be nothing.
    let (container, session) = match launched {
        Ok(launched) => launched,
        Err(error) => {
            live.close();
            return Err(error);
        }
    };
    let (started, running) = oneshot::channel();
    follow(server, &live, container.clone(), session, Some(started)).await?;
    let lost = || ApiError::internal("the cell ended before its program started");
    running.await.unwrap_or_else(|_| Err(lost()))?;
    server.tell(&container, "start", &[]);
    Ok(true)
}

/// Makes `container` a cell; what it is from then on, and its session. Blocks.
fn launch(server: &Server, mut container: Container) -> ApiResult<(Container, BlockingStream)> {
    let _held = server.containers.prepare(&mut container)?;
    starts::check_start(&server.containers, &container)?;
    Publish::number_all(&mut container.spec.publish)?;
    // The launcher reads it.
    server.containers.write(&container)?;
    let session = match from_pool(server, &container)? {
        Some(taken) => taken,
        None => launcher::launch(server.layout(), &Start::Container(container.id()))?,
    };
    container.started = true;
    server.containers.write(&container)?;
    Ok((container, session))
}

/// The session of the warm cell that was kept for `container`.
fn from_pool(server: &Server, container: &Container) -> ApiResult<Option<BlockingStream>> {
    let caps = container.spec.granted()?;
    let tty = container.tty_size.map(|(rows, cols)| TtySize { rows, cols });
    let taken = warm::take_reserved(server.layout(), &container.spec, &caps, tty)?;
    Ok(taken.map(|taken| taken.session))
}

/// Makes sure that a running container is followed, whoever started it.
pub async fn adopt(server: &Arc<Server>, seen: &Seen) -> ApiResult<()> {
    let live = server.live(seen.id());
    if live.is_followed() {
        return Ok(());
    }
    let record = seen.running()?.0.clone();
    match server.blocking(move |_| Ok(onlook(&record)?)).await {
        Ok(session) => follow(server, &live, seen.container.clone(), session, None).await,
        // It may have ended, or have too many followers.
        Err(error) => Err(error),
    }
}

fn onlook(record: &Record) -> Result<BlockingStream, CellError> {
    let client = Client::connect(record)?;
    client.ask(&ControlRequest::Attach { replay: false })?;
    Ok(client.into_stream())
}

async fn follow(
    server: &Arc<Server>,
    live: &Arc<Live>,
    container: Container,
    session: BlockingStream,
    started: Option<Started>,
) -> ApiResult<()> {
    let failed = |error| ApiError::internal(format!("cannot follow the cell: {error}"));
    session.set_nonblocking(true).map_err(failed)?;
    let (mut output, input) = UnixStream::from_std(session).map_err(failed)?.into_split();
    if !live.begin(input) {
        return Ok(());
    }
    if container.config.healthcheck.is_some() {
        health::follow(server, container.clone());
    }
    let (server, live) = (server.clone(), live.clone());
    tokio::spawn(async move {
        let told = hear(&server, &live, &mut output, started).await;
        live.close();
        settle(&server, &live, &container, told).await;
    });
    Ok(())
}

/// Passes on what the session brings; the exit code, if it was told.
async fn hear(
    server: &Arc<Server>,
    live: &Arc<Live>,
    output: &mut tokio::net::unix::OwnedReadHalf,
    mut started: Option<Started>,
) -> Option<u8> {
    let mut started = |result| started.take().map(|started| started.send(result));
    while let Ok(Some(frame)) = read_frame(output).await {
        if frame.kind != Kind::Reply {
            if let Some(chunk) = Chunk::of(frame) {
                live.tell(chunk, &Watch { server, id: &live.id }).await;
            }
            continue;
        }
        match frame.json::<Reply>() {
            Ok(Reply::Started { .. }) => {
                started(Ok(()));
            }
            Ok(Reply::Exited { code, .. }) => {
                started(Ok(()));
                return Some(code);
            }
            Ok(Reply::Failed { kind, message }) => {
                let (code, error) = not_started(kind, &message);
                // Without a start to tell of, this is a follower cut off.
                return started(Err(error)).map(|_| code);
            }
            Ok(_) | Err(_) => return None,
        }
    }
    None
}

/// The exit code, and the words by which the docker command finds it.
fn not_started(kind: FailureKind, message: &str) -> (u8, ApiError) {
    let (code, words) = match kind {
        FailureKind::NotFound => (127, "executable file not found"),
        FailureKind::NotExecutable => (126, "permission denied"),
        _ => (125, "the guest refused it"),
    };
    (code, ApiError::bad_request(format!("failed to start the program: {message}: {words}")))
}

/// Looks whether a container is over.
struct Watch<'a> {
    server: &'a Arc<Server>,
    id: &'a str,
}

impl Overseer for Watch<'_> {
    async fn is_over(&self) -> bool {
        !is_alive(self.server, self.id).await
    }
}

async fn is_alive(server: &Arc<Server>, id: &str) -> bool {
    server.find(id).await.is_ok_and(|seen| seen.is_running())
}

/// What came of a call to the guest of container `id`; 409 where its program ended meanwhile.
pub async fn unless_over<T>(server: &Arc<Server>, id: &str, came: ApiResult<T>) -> ApiResult<T> {
    match came {
        Err(error)
            if error.status == StatusCode::INTERNAL_SERVER_ERROR && is_over(server, id).await =>
        {
            Err(ApiError::conflict(format!("container {id} is not running: it ended meanwhile")))
        }
        came => came,
    }
}

/// Whether a container whose guest has broken off is over: that is written down a moment later.
pub async fn is_over(server: &Arc<Server>, id: &str) -> bool {
    for _ in 0..ENDING_LOOKS {
        if !is_alive(server, id).await {
            return true;
        }
        tokio::time::sleep(ENDING_LOOK).await;
    }
    false
}

/// [`adopt`] for the task that it starts.
pub fn adopt_again<'a>(
    server: &'a Arc<Server>,
    seen: &'a Seen,
) -> Pin<Box<dyn Future<Output = ApiResult<()>> + Send + 'a>> {
    Box::pin(adopt(server, seen))
}

/// The session is over: finds out how the container is, and tells.
async fn settle(server: &Arc<Server>, live: &Arc<Live>, container: &Container, told: Option<u8>) {
    let mut found = server.find(&live.id).await;
    while told.is_none()
        && let Ok(seen) = &found
        && seen.is_running()
    {
        // Cut off: it goes on, and so do we. Whoever waits is told later.
        if adopt_again(server, seen).await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        found = server.find(&live.id).await;
    }
    let recorded = found.as_ref().ok().and_then(|seen| seen.status()?.exit_code);
    let code = told.or(recorded).unwrap_or(KILLED);
    server.tell(container, "die", &[("exitCode", code.to_string())]);
    live.ended(code);
    let kept = |seen: &Seen| !seen.container.spec.restart.is_no();
    let goes_on = |seen: &Seen| kept(seen) && (seen.is_restarting() || seen.is_running());
    if found.as_ref().is_ok_and(goes_on) {
        restarts::follow(server, container);
        return;
    }
    // A record that is to be removed goes before its followers hear of the end.
    let gone = found.is_err_and(|error| error.status == StatusCode::NOT_FOUND);
    if gone || container.spec.remove {
        let own = container.clone();
        let forget = move |server: &Server| {
            server.containers.forget(own.id())?;
            if own.spec.remove {
                volumes::discard_of(server, &own);
            }
            Ok(())
        };
        // What is left is swept by the next who looks.
        let _ = server.blocking(forget).await;
        server.tell(container, "destroy", &[]);
        server.bury(&live.id);
    }
}

/// Waits until container `seen` has ended, at most `limit`; whether it has.
async fn await_end(server: &Arc<Server>, seen: &Seen, limit: Duration) -> bool {
    let live = server.live(seen.id());
    let mut life = live.life();
    let ends = life.borrow().ends;
    if adopt(server, seen).await.is_err() || !live.is_followed() {
        return !is_alive(server, seen.id()).await;
    }
    timeout(limit, life.wait_for(|life| life.ends > ends || life.removed)).await.is_ok()
}

/// Has nobody start container `seen` again but by hand.
pub async fn stays_ended(server: &Arc<Server>, seen: &Seen) -> ApiResult<()> {
    let Some((record, _)) = seen.cell.clone() else { return Ok(()) };
    let spec = seen.container.spec.clone();
    server.blocking(move |_| Ok(record.stay_ended(&spec)?)).await
}

/// Sends the program of `seen` a signal; SIGKILL ends the cell.
pub async fn signal(server: &Arc<Server>, seen: &Seen, signal: Signal) -> ApiResult<()> {
    let record = seen.running()?.0.clone();
    let sent = server.blocking(move |server| Ok(end::kill(server.layout(), &record, signal)?));
    match sent.await {
        // It ended before the signal came.
        Err(_) if !is_alive(server, seen.id()).await => Ok(()),
        other => other,
    }?;
    server.tell(&seen.container, "kill", &[("signal", signal.number().to_string())]);
    Ok(())
}

/// How `key` is to be stopped, as far as its client says.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// Before it is killed; negative: never.
    pub seconds: Option<i64>,
    pub signal: Option<String>,
}

/// Ends container `key` in order. False when it does not run.
pub async fn stop(server: &Arc<Server>, key: &str, how: Stop) -> ApiResult<bool> {
    let found = server.find(key).await?;
    let restarting = found.is_restarting();
    stays_ended(server, &found).await?;
    // It may have been started again in the last moment.
    let seen = server.find(found.id()).await?;
    if !seen.is_running() {
        return Ok(restarting);
    }
    let config = &seen.container.config;
    let seconds = how.seconds.or(config.stop_timeout).unwrap_or(STOP_SECONDS);
    let grace = u64::try_from(seconds).map_or(Duration::MAX, Duration::from_secs);
    // What an image says that means nothing is not its containers' fault.
    let own = || config.stop_signal.as_deref()?.parse().ok();
    let asked = how.signal.as_deref().map(str::parse).transpose()?;
    let first = asked.or_else(own).unwrap_or(Signal::TERM);
    if !grace.is_zero() {
        // Listens before it signals: a quick end is not to be missed.
        let ended = await_end(server, &seen, grace);
        if in_order(ended, signal(server, &seen, first)).await {
            server.tell(&seen.container, "stop", &[]);
            return Ok(true);
        }
    }
    kill_now(server, &seen).await?;
    server.tell(&seen.container, "stop", &[]);
    Ok(true)
}

/// Whether a program ended as it was asked to. A guest that does not take the signal, or does not
/// say so in time, does not keep the container alive: false says that it is to be killed.
async fn in_order(
    ended: impl Future<Output = bool>,
    signalled: impl Future<Output = ApiResult<()>>,
) -> bool {
    let mut ended = pin!(ended);
    tokio::select! {
        biased;
        ended = &mut ended => ended,
        signalled = signalled => signalled.is_ok() && ended.await,
    }
}

/// Ends a running container at once and waits until that is told.
pub async fn kill_now(server: &Arc<Server>, seen: &Seen) -> ApiResult<()> {
    let ended = await_end(server, seen, Duration::from_secs(10));
    let (_, killed) = tokio::join!(ended, signal(server, seen, Signal::KILL));
    killed
}

/// Removes container `key`; `force` ends it first. With `with_volumes` its volumes without names go,
/// too.
pub async fn remove(
    server: &Arc<Server>,
    key: &str,
    force: bool,
    with_volumes: bool,
) -> ApiResult<()> {
    let seen = server.find(key).await?;
    let live = server.live(seen.id());
    let changing = live.claim(if force { Duration::ZERO } else { READERS_PATIENCE }).await;
    // It may have ended, or begun, while we waited.
    let seen = server.find(seen.id()).await?;
    let ends = live.life().borrow().ends;
    let restarting = seen.is_restarting();
    if !force && (seen.is_running() || restarting) {
        return Err(ApiError::conflict(format!(
            "cannot remove container \"/{}\": container is {}: stop the container before removing or force remove",
            seen.container.name(),
            seen.state()
        )));
    }
    stays_ended(server, &seen).await?;
    // It may have been started again in the last moment.
    let seen = server.find(seen.id()).await?;
    if seen.is_running() {
        kill_now(server, &seen).await?;
    }
    let (cell, id) = (seen.cell.clone(), seen.id().to_owned());
    let own = seen.container.clone();
    let code = server
        .blocking(move |server| {
            let mut code = None;
            // A record that removed itself is removed.
            if let Some((record, _)) = cell
                && let Ok((record, _, status)) = Record::find(server.layout(), &record.id)
            {
                code = status.exit_code;
                end::remove(server.layout(), &record, &status, true)?;
            }
            warm::release(server.layout(), &id)?;
            server.containers.forget(&id)?;
            if with_volumes || own.spec.remove {
                volumes::discard_of(server, &own);
            }
            server.containers.disown_volumes_of(&own);
            Ok(code)
        })
        .await?;
    drop(changing);
    // The end of one that removes itself has told that already.
    if !(seen.container.spec.remove && seen.is_running()) {
        server.tell(&seen.container, "destroy", &[]);
    }
    live.close();
    // Whoever follows it may not have heard the end yet: those who wait hear it all the same.
    let is_told = !seen.is_running() || live.life().borrow().ends > ends;
    server.bury_ended(&live.id, (!is_told).then_some(code.unwrap_or(KILLED)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};

    #[tokio::test]
    async fn a_guest_that_does_not_answer_is_killed_all_the_same() {
        let refused = || Err(ApiError::internal("signal 15 was not delivered"));
        assert!(!in_order(pending(), ready(refused())).await, "it need not be waited for");
        assert!(!in_order(ready(false), pending()).await, "nor its agent's answer");
        assert!(!in_order(ready(false), ready(Ok(()))).await);
        assert!(in_order(ready(true), ready(refused())).await, "it ended before the signal came");
        let late = async {
            tokio::task::yield_now().await;
            true
        };
        assert!(in_order(late, ready(Ok(()))).await);
    }
}
