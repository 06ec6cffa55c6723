//! Containers that start again by their policy: their restarters do that, whether there is a server
//! or not. A server follows them, so that its clients hear of each end and start.

use std::sync::Arc;
use std::time::Duration;

use exocell_cell::State;

use crate::containers::{Container, Seen};
use crate::lifecycle;
use crate::state::Server;

/// How soon a container is looked at again.
const LOOK: Duration = Duration::from_millis(50);

/// What was told of a container's starts and ends.
struct Told<'a> {
    server: &'a Arc<Server>,
    container: &'a Container,
    restarts: u32,
    /// Whether a start was told whose end was not.
    runs: bool,
}

impl Told<'_> {
    /// Tells what came since: so many starts by now, the last end with `code`.
    fn catch_up(&mut self, restarts: u32, runs: bool, code: u8) {
        while self.restarts < restarts {
            self.end(code);
            self.server.tell(self.container, "start", &[]);
            (self.runs, self.restarts) = (true, self.restarts + 1);
        }
        if !runs {
            self.end(code);
        }
    }

    fn end(&mut self, code: u8) {
        if std::mem::take(&mut self.runs) {
            self.server.tell(self.container, "die", &[("exitCode", code.to_string())]);
            self.server.live(self.container.id()).ended(code);
        }
    }
}

/// Follows a container that has ended and starts again, until it is followed as any that runs, or
/// stays ended.
pub fn follow(server: &Arc<Server>, container: &Container) {
    let live = server.live(container.id());
    if !live.await_restart() {
        return;
    }
    let (server, container) = (server.clone(), container.clone());
    tokio::spawn(async move {
        let restarts = container.spec.restarts;
        let mut told = Told { server: &server, container: &container, restarts, runs: false };
        let code = until_it_stays(&mut told).await;
        live.restarted();
        if let Some(code) = code {
            // Whoever began to wait in between hears that there is nothing to wait for.
            live.ended(code);
        }
    });
}

/// The exit code of a container that stays ended; `None` where it runs and is followed, or is gone.
async fn until_it_stays(told: &mut Told<'_>) -> Option<u8> {
    let (server, id) = (told.server, told.container.id());
    loop {
        let seen = look(server, told.container).await?;
        let (status, spec) = (seen.status()?, &seen.container.spec);
        let code = status.exit_code.unwrap_or(0);
        told.catch_up(spec.restarts, status.state != State::Exited, code);
        match status.state {
            State::Exited if !seen.is_restarting() => return Some(code),
            State::Running => {
                server.live(id).restarted();
                // One that has ended by now is found so the next time.
                if lifecycle::adopt_again(server, &seen).await.is_ok() {
                    return None;
                }
                server.live(id).await_restart();
            }
            State::Exited | State::Created => {}
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// The container as it is now, if it is there still.
async fn look(server: &Arc<Server>, container: &Container) -> Option<Seen> {
    let container = container.clone();
    let looked = server.blocking(move |server| {
        let Some((record, spec, status)) = server.containers.look(container.id())? else {
            return Ok(None);
        };
        let container = Container { spec, ..container };
        Ok(Some(Seen { container, cell: Some((record, status)) }))
    });
    looked.await.ok().flatten()
}

/// Starts the containers that their policies want after an end of the host, or of all its cells.
pub fn revive(server: &Arc<Server>, all: &[Seen]) {
    let is_wanted = |seen: &&Seen| {
        let own = !seen.container.image_id.is_empty();
        own && seen.cell.as_ref().is_some_and(|(record, status)| {
            !seen.is_restarting() && record.is_wanted_at_boot(&seen.container.spec, status)
        })
    };
    for seen in all.iter().filter(is_wanted) {
        let (server, id) = (server.clone(), seen.id().to_owned());
        tokio::spawn(async move {
            // One that does not start says why in its record.
            let _ = lifecycle::start(&server, &id).await;
        });
    }
}
