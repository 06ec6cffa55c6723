//! A build of a client that speaks BuildKit's protocol, on a thread of its own.

use std::sync::Arc;

use exocell_cell::CellError;
use exocell_cell::agent::printable_lines;
use exocell_cell::images::{Credentials, Reference};

use super::attributes::Asked;
use super::contexts;
use super::lines::at;
use crate::build::call::fetch;
use crate::build::{self, Begun, Build, BuildError, Built, Named};
use crate::grpc::{Code, Result, Status};
use crate::progress::Progress;

/// What registries of Docker's own call themselves to clients.
const HUB: &str = "registry-1.docker.io";

/// Builds what was asked for; the image. Blocks.
///
/// # Errors
/// Why there is none.
pub fn build(client: &contexts::Client<'_>, asked: Asked, name: &str) -> Result<Built> {
    let mut progress = Progress::new(client.job.journal.clone(), name);
    let built = begin(client, asked, &mut progress);
    let words = built.as_ref().err().map(|status| status.words.as_str());
    progress.end(words);
    built
}

fn begin(
    client: &contexts::Client<'_>,
    mut asked: Asked,
    progress: &mut Progress,
) -> Result<Built> {
    let contexts::Taken { context, dockerfile } = client.take(&asked, progress)?;
    asked.options.dockerfile = dockerfile;
    for (name, directory) in std::mem::take(&mut asked.directories) {
        let files = client.directory(&directory, &asked, progress)?;
        asked.options.named.insert(name, Named::Files(Arc::new(files)));
    }
    let warnings = asked.warnings.iter().map(String::as_str).chain(client.job.warnings());
    warnings.for_each(|words| progress.warn(words));
    let options = &asked.options;
    let mut told = Told { client, progress, line: 0 };
    let stopper = &client.job.stopper;
    let built = Build::new(client.server.layout(), options, Some(&context), &mut told, stopper)
        .and_then(Build::build);
    let line = told.line;
    built.map_err(|error| {
        let line = match &error {
            BuildError::Dockerfile(error) => error.line,
            _ => line,
        };
        at(status(error), &asked.file, &options.dockerfile, line)
    })
}

/// A failed build, in the words of the protocol's clients.
pub fn status(error: BuildError) -> Status {
    let words = match &error {
        BuildError::Program { command, code } => {
            format!("process {command:?} did not complete successfully: exit code: {code}")
        }
        error => error.to_string(),
    };
    let code = match error {
        BuildError::Cancelled => Code::Cancelled,
        BuildError::Dockerfile(_) | BuildError::Refused(_) => Code::InvalidArgument,
        BuildError::Program { .. } | BuildError::Cell(_) => Code::Unknown,
    };
    Status::new(code, printable_lines(&words))
}

/// What the build tells and asks.
struct Told<'a> {
    client: &'a contexts::Client<'a>,
    progress: &'a mut Progress,
    /// Where the step that began last is in the Dockerfile.
    line: usize,
}

impl build::Client for Told<'_> {
    fn say(&mut self, text: &str) {
        match text.trim_end().strip_prefix("[Warning] ") {
            Some(words) => self.progress.warn(words),
            None => self.progress.log(1, printable_lines(text).as_bytes()),
        }
    }

    fn begun(&mut self, step: &Begun<'_>) {
        self.line = step.line;
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

    fn secret(&mut self, id: &str) -> std::result::Result<Option<Vec<u8>>, CellError> {
        let secret = self.client.handle.block_on(self.client.session.secret(id));
        secret.map_err(|status| CellError::Usage(format!("the secret {id}: {status}")))
    }

    fn fetch(&mut self, name: &str) -> std::result::Result<(), CellError> {
        let reference: Reference = name.parse()?;
        let host = match reference.registry.as_str() {
            "docker.io" => HUB,
            other => other,
        };
        self.progress.part(&format!("resolve {reference}"));
        let known = self.client.handle.block_on(self.client.session.credentials(host));
        // One that does not say has none; the registry says whether that is enough.
        let known = known.ok().flatten();
        let known = known.map(|(username, password)| Credentials { username, password });
        fetch(self.client.server, name, known)
    }
}
