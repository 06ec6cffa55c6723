//! The health checks of containers, which their cells make by themselves: what is told of them.

use std::os::unix::net::UnixStream as BlockingStream;
use std::sync::Arc;
use std::time::Duration;

use exocell_cell::agent::Kind;
use exocell_cell::control::{Client, ControlReply, ControlRequest};
use exocell_cell::health::{self, News};
use exocell_cell::{CellError, Layout, Record, State};
use tokio::net::UnixStream;

use crate::containers::Container;
use crate::error::ApiResult;
use crate::frames::read_frame;
use crate::ids::new_id;
use crate::state::Server;

/// How often and how soon a supervisor is asked that is still coming up.
const LOOKS: u32 = 20;
const LOOK: Duration = Duration::from_millis(100);

/// Tells the events of the checks of `container`, which runs, until it ends.
pub fn follow(server: &Arc<Server>, container: Container) {
    let server = server.clone();
    tokio::spawn(async move {
        let id = container.id().to_owned();
        let watched = server.blocking(move |server| Ok(watch(server.layout(), &id)?)).await;
        // One that ended at once has nothing to tell.
        if let Ok(Ok(stream)) = watched.map(UnixStream::from_std) {
            hear(&server, &container, stream).await;
        }
    });
}

/// A stream of what happens with the checks of cell `id`. Blocks.
fn watch(layout: &Layout, id: &str) -> Result<BlockingStream, CellError> {
    let ask = || {
        let (record, _, status) = Record::find(layout, id)?;
        if status.state == State::Exited {
            return Err(CellError::NoSuchCell(id.to_owned()));
        }
        let client = Client::connect(&record)?;
        client.ask(&ControlRequest::Watch)?;
        Ok(client.into_stream())
    };
    let mut looks = 0;
    let stream = loop {
        looks += 1;
        match ask() {
            Err(CellError::NoSuchCell(id)) => return Err(CellError::NoSuchCell(id)),
            Err(_) if looks < LOOKS => std::thread::sleep(LOOK),
            other => break other?,
        }
    };
    stream.set_nonblocking(true).map_err(CellError::host("cannot follow the cell"))?;
    Ok(stream)
}

async fn hear(server: &Arc<Server>, container: &Container, mut stream: UnixStream) {
    let words = words(container).join(" ");
    let mut exec = String::new();
    while let Ok(Some(frame)) = read_frame(&mut stream).await {
        let news = (frame.kind == Kind::Reply).then(|| frame.json::<ControlReply>());
        let Some(Ok(ControlReply::Health(news))) = news else { return };
        match news {
            News::Began => {
                let made: ApiResult<String> = new_id();
                exec = made.unwrap_or_default();
                for action in ["exec_create", "exec_start"] {
                    let told = [("execID", exec.clone())];
                    server.tell(container, format!("{action}: {words}"), &told);
                }
            }
            News::Ended { exit_code } => {
                let told = [("execID", exec.clone()), ("exitCode", exit_code.to_string())];
                server.tell(container, "exec_die", &told);
            }
            News::Became(status) => {
                server.tell(container, format!("health_status: {}", status.name()), &[]);
            }
        }
    }
}

/// The program of its check.
fn words(container: &Container) -> Vec<String> {
    let test = container.config.healthcheck.iter().flat_map(|check| &check.test);
    let test: Vec<String> = test.cloned().collect();
    match test.split_first() {
        Some((kind, lines)) if kind == "CMD-SHELL" => [&health::shell_of(&[]), lines].concat(),
        Some((_, words)) => words.to_vec(),
        None => Vec::new(),
    }
}
