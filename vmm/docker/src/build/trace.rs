//! `POST /build?version=2`: the same archive of the context in, BuildKit's own messages out, each in
//! a line of JSON. Clients without BuildKit's other protocol ask so.
//!
//! ```text
//! build's thread ── Journal ──> {"id": "moby.buildkit.trace", "aux": StatusResponse, base64} ...
//!        └───────── its end ──> {"id": "moby.image.id", ...} or {"errorDetail": ...}
//! ```

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use exocell_cell::CellError;
use exocell_cell::agent::printable_lines;
use exocell_cell::images::Rootfs;
use prost::Message;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use super::call::{fetch, tell_tags};
use super::{Begun, Build, BuildError, Client, Options, Stopper};
use crate::http::BodySender;
use crate::ids::new_id;
use crate::progress::{Journal, Progress};
use crate::state::Server;

/// Passes on what the journal holds, and at last what came of the build.
pub fn pass_on(journal: &Arc<Journal>, sender: BodySender) -> oneshot::Sender<Value> {
    let (told, last) = oneshot::channel();
    let ear = journal.hear();
    tokio::spawn(async move {
        let Some(mut ear) = ear else { return };
        while let Some(update) = ear.next().await {
            let aux = STANDARD.encode(update.encode_to_vec());
            if !sender.line(&json!({ "id": "moby.buildkit.trace", "aux": aux })).await {
                return;
            }
        }
        if let Ok(last) = last.await {
            // One that is gone has the build stopped by another way.
            let _ = sender.line(&last).await;
        }
    });
    told
}

/// Builds, and tells `journal` of it; what its client hears last. Blocks.
pub fn carry_out(
    server: &Arc<Server>,
    options: &Options,
    context: &Rootfs,
    stopper: &Stopper,
    journal: &Arc<Journal>,
) -> Value {
    let name = new_id().unwrap_or_default();
    let mut progress = Progress::new(journal.clone(), &name);
    let mut client = Traced { server, progress: &mut progress };
    let built = Build::new(server.layout(), options, Some(context), &mut client, stopper)
        .and_then(Build::run);
    let last = match built {
        Ok(id) => {
            progress.end(None);
            tell_tags(server, &options.tags, &id.to_string());
            json!({ "id": "moby.image.id", "aux": { "ID": id.to_string() } })
        }
        Err(error) => {
            let message = printable_lines(&error.to_string()).into_owned();
            progress.end(Some(&message));
            let mut detail = json!({ "message": message });
            if let BuildError::Program { code, .. } = error {
                detail["code"] = json!(code);
            }
            json!({ "errorDetail": detail, "error": message })
        }
    };
    journal.end();
    last
}

struct Traced<'a> {
    server: &'a Arc<Server>,
    progress: &'a mut Progress,
}

impl Client for Traced<'_> {
    fn say(&mut self, text: &str) {
        match text.trim_end().strip_prefix("[Warning] ") {
            Some(words) => self.progress.warn(words),
            None => self.progress.log(1, printable_lines(text).as_bytes()),
        }
    }

    fn begun(&mut self, step: &Begun<'_>) {
        let (at, count) = step.of_stage;
        let stage = step.stage.map_or_else(String::new, |stage| format!("{stage} "));
        self.progress.begin(&format!("[{stage}{at}/{count}] {}", step.text));
    }

    fn cached(&mut self) {
        self.progress.cached();
    }

    fn runs(&mut self, _cell: &str) {}

    fn done(&mut self, _id: &str) {
        self.progress.end(None);
    }

    fn output(&mut self, bytes: &[u8]) {
        self.progress.log(1, bytes);
    }

    fn complaint(&mut self, bytes: &[u8]) {
        self.progress.log(2, bytes);
    }

    fn fetch(&mut self, name: &str) -> Result<(), CellError> {
        // With nobody's credentials: a Dockerfile names images of others.
        fetch(self.server, name, None)
    }
}
