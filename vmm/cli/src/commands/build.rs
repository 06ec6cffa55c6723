//! `exocell build`: an image from a Dockerfile.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use exocell_cell::granted::Links;
use exocell_cell::images::dockerfile::ignore::{self, Ignore};
use exocell_cell::images::{self, Digest, Reference, Rootfs, Store, dockerfile};
use exocell_cell::settings::Settings;
use exocell_cell::{CellError, Layout, compose};
use exocell_docker::build::{
    self, Build, BuildError, Client, Options, SecretFile, Stopper, check_platform,
};
use nix::sys::signal::{SigSet, Signal};

use super::{image, serve};
use crate::args::{BuildArgs, BuildProgress, Pull};
use crate::show::say;

/// What a build that fails exits with, as docker's does.
const FAILED: u8 = 1;
/// How long a build that is interrupted may take to leave nothing behind.
const LEAVE_MAX: Duration = Duration::from_secs(20);
/// The beginning of an archive: its first header.
const HEADER_BYTES: u64 = 512;

/// Where the Dockerfile and the files are from.
struct Input {
    text: String,
    context: Option<Rootfs>,
}

pub fn build(layout: &Layout, args: BuildArgs) -> Result<u8, CellError> {
    // Lines are all that there is.
    let (BuildProgress::Plain | BuildProgress::Auto) = args.progress;
    let store = Store::open(layout.images())?;
    let stopper = Arc::new(Stopper::default());
    // Before there is another thread: a signal comes to the one that waits for it.
    let stopped = stop_on_signals(layout, stopper.clone())?;
    let mut options = options(layout, &args)?;
    let input = input(layout, &store, &args)?;
    options.dockerfile = input.text;
    let mut client = Terminal { layout, quiet: args.quiet };
    let built = Build::new(layout, &options, input.context.as_ref(), &mut client, &stopper)
        .and_then(Build::run);
    let id = match built {
        Ok(id) => id,
        Err(BuildError::Cancelled) => return Ok(128 + stopped.load(Ordering::Relaxed) as u8),
        Err(BuildError::Cell(error)) => return Err(error),
        Err(error) => {
            return Err(CellError::Program { message: error.to_string(), exit_code: FAILED });
        }
    };
    if let Some(path) = &args.iidfile {
        write_id(layout, path, id)?;
    }
    if !args.quiet {
        for tag in &options.tags {
            crate::show::tell!("Successfully tagged {tag}");
        }
    }
    say!("{id}");
    Ok(0)
}

/// Has the build end at SIGINT, SIGTERM and SIGHUP; this process with the second, or if it takes
/// too long. The last signal that came.
fn stop_on_signals(layout: &Layout, stopper: Arc<Stopper>) -> Result<Arc<AtomicI32>, CellError> {
    let signals: SigSet = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect();
    signals
        .thread_block()
        .map_err(|errno| CellError::host("cannot wait for signals")(errno.into()))?;
    let stopped = Arc::new(AtomicI32::new(Signal::SIGINT as i32));
    let (layout, noted) = (layout.clone(), stopped.clone());
    std::thread::spawn(move || {
        let mut is_second = false;
        while let Ok(signal) = signals.wait() {
            let code = signal as i32;
            noted.store(code, Ordering::Relaxed);
            if std::mem::replace(&mut is_second, true) {
                std::process::exit(128 + code);
            }
            let (layout, stopper) = (layout.clone(), stopper.clone());
            std::thread::spawn(move || {
                stopper.stop(&layout);
                std::thread::sleep(LEAVE_MAX);
                // What is left goes with the next build.
                std::process::exit(128 + code)
            });
        }
    });
    Ok(stopped)
}

fn usage(flag: &str) -> impl Fn(String) -> CellError {
    move |why| CellError::Usage(format!("{flag}: {why}"))
}

fn options(layout: &Layout, args: &BuildArgs) -> Result<Options, CellError> {
    let platform = args.platform.as_deref().unwrap_or_default();
    check_platform(platform).map_err(CellError::Usage)?;
    let mut grant =
        serve::defaults(args.memory.as_deref(), &args.disk, args.pids_limit, &args.allow_net)?;
    if let Some(cpus) = args.cpus {
        grant.vcpus = cpus;
    }
    let network = build::network(layout, args.network.as_deref(), &mut grant)?;
    let mut hosts = Settings::default();
    for host in &args.add_host {
        hosts.add_host(host).map_err(usage("--add-host"))?;
    }
    let tags = args.tag.iter().map(|tag| tag.parse::<Reference>());
    Ok(Options {
        dockerfile: String::new(),
        tags: tags.collect::<Result<_, _>>()?,
        arguments: arguments(&args.build_arg),
        labels: labels(&args.label),
        target: args.target.clone(),
        uses_cache: !args.no_cache,
        pulls: args.pull,
        secrets: secrets(layout, &args.secret)?,
        grant,
        network,
        hosts: hosts.hosts,
        shm_bytes: args.shm_size,
        // What is left out is not in the context here.
        hidden: Vec::new(),
        named: std::collections::BTreeMap::new(),
    })
}

/// `NAME=VALUE`; `NAME` with this environment's value, if it has one.
fn arguments(texts: &[String]) -> BTreeMap<String, String> {
    let read = |text: &String| match text.split_once('=') {
        Some((name, value)) => Some((name.to_owned(), value.to_owned())),
        None => std::env::var(text).ok().map(|value| (text.clone(), value)),
    };
    texts.iter().filter_map(read).collect()
}

fn labels(texts: &[String]) -> BTreeMap<String, String> {
    let read = |text: &String| {
        let (name, value) = text.split_once('=').unwrap_or((text, ""));
        (name.to_owned(), value.to_owned())
    };
    texts.iter().map(read).collect()
}

/// `id=NAME[,src=FILE]`
fn secrets(layout: &Layout, texts: &[String]) -> Result<Vec<SecretFile>, CellError> {
    let refused = |text: &str, why: &str| CellError::Usage(format!("--secret {text}: {why}"));
    let read = |text: &String| {
        let (mut id, mut source) = (None, None);
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("id", value)) => id = Some(value.to_owned()),
                Some(("src" | "source", value)) => source = Some(PathBuf::from(value)),
                Some(("type", "file")) => {}
                _ => return Err(refused(text, "give id=NAME,src=FILE")),
            }
        }
        let id = id.filter(|id| !id.is_empty()).ok_or_else(|| refused(text, "it has no id"))?;
        let source = source.unwrap_or_else(|| PathBuf::from(&id));
        let failed = CellError::host(format!("--secret: cannot read {}", source.display()));
        let path = Links::outside(layout).real(&source).map_err(failed)?;
        Ok(SecretFile { id, path })
    };
    texts.iter().map(read).collect()
}

fn input(layout: &Layout, store: &Store, args: &BuildArgs) -> Result<Input, CellError> {
    let file = args.file.as_deref();
    if args.path == Path::new("-") {
        return piped(layout, store, file);
    }
    let path = &args.path;
    if path.to_string_lossy().contains("://") || path.to_string_lossy().starts_with("git@") {
        return Err(CellError::Usage(format!(
            "{}: nothing is fetched here; fetch it, and give its directory",
            path.display()
        )));
    }
    let text = match file {
        Some(file) if file == Path::new("-") => text_of(&mut io::stdin().lock())?,
        Some(file) => read(layout, file)?,
        None => read(layout, &path.join("Dockerfile"))?,
    };
    let ignored = ignored(layout, path, file)?;
    let found = Links::outside(layout)
        .follow(path)
        .map_err(CellError::host(format!("cannot read {}", path.display())))?;
    if !found.is_directory() {
        return Err(CellError::Usage(format!(
            "{} is no directory; give the directory of the build's files, or - for standard input",
            path.display()
        )));
    }
    let context = compose::take(store, |to| {
        let mut to = BufWriter::with_capacity(64 << 10, to);
        images::context(&found, &ignored, &mut to)
    });
    Ok(Input { text, context: Some(context?) })
}

/// What the context leaves out: a file beside the Dockerfile comes first.
fn ignored(layout: &Layout, path: &Path, file: Option<&Path>) -> Result<Ignore, CellError> {
    let beside = file.filter(|file| *file != Path::new("-")).map(|file| {
        let mut name = file.as_os_str().to_owned();
        name.push(".dockerignore");
        PathBuf::from(name)
    });
    let of_default = file.is_none().then(|| path.join("Dockerfile.dockerignore"));
    let candidates = beside.into_iter().chain(of_default).chain([path.join(".dockerignore")]);
    for candidate in candidates {
        match Links::outside(layout).text(&candidate, ignore::BYTES_MAX) {
            Ok((text, _)) => return Ignore::read(&text).map_err(CellError::Usage),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                return Err(CellError::host(format!("cannot read {}", candidate.display()))(error));
            }
        }
    }
    Ok(Ignore::default())
}

fn read(layout: &Layout, path: &Path) -> Result<String, CellError> {
    let failed = CellError::host(format!("cannot read the Dockerfile {}", path.display()));
    Links::outside(layout).text(path, dockerfile::BYTES_MAX).map(|(text, _)| text).map_err(failed)
}

fn text_of(from: &mut dyn Read) -> Result<String, CellError> {
    let mut text = String::new();
    let read = from.take(dockerfile::BYTES_MAX + 1).read_to_string(&mut text);
    read.map_err(CellError::host("cannot read the Dockerfile on standard input"))?;
    Ok(text)
}

/// Standard input: an archive of the context, or a Dockerfile that needs none.
fn piped(layout: &Layout, store: &Store, file: Option<&Path>) -> Result<Input, CellError> {
    let mut stdin = io::stdin().lock();
    let failed = || CellError::host("cannot read standard input");
    let mut head = Vec::new();
    stdin.by_ref().take(HEADER_BYTES).read_to_end(&mut head).map_err(failed())?;
    let is_packed = head.starts_with(&[0x1f, 0x8b]) || head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]);
    let is_archive = is_packed || head.get(257..262) == Some(b"ustar");
    let mut whole = io::Cursor::new(head).chain(stdin);
    if !is_archive {
        if let Some(file) = file {
            return Err(CellError::Usage(format!(
                "-f {}: standard input is a Dockerfile already; leave -f out",
                file.display()
            )));
        }
        return Ok(Input { text: text_of(&mut whole)?, context: None });
    }
    // Standard input is this thread's.
    let mut spool = store.scratch()?;
    io::copy(&mut whole, &mut spool).map_err(failed())?;
    io::Seek::rewind(&mut spool).map_err(failed())?;
    let context = compose::take(store, |mut to| io::copy(&mut spool, &mut to).map(drop))?;
    let name = file.unwrap_or(Path::new("Dockerfile"));
    let inside = name.to_str().filter(|_| name.is_relative());
    let text = match inside {
        Some(inside) => compose::text(&context, inside, dockerfile::BYTES_MAX)?,
        None => Some(read(layout, name)?),
    };
    let text = text.ok_or_else(|| {
        CellError::Usage(format!("the archive on standard input has no {}", name.display()))
    })?;
    Ok(Input { text, context: Some(context) })
}

/// Whole or not there at all.
fn write_id(layout: &Layout, path: &Path, id: Digest) -> Result<(), CellError> {
    let failed = || CellError::host(format!("cannot write {} (--iidfile)", path.display()));
    let (directory, name) = Links::outside(layout).place(path).map_err(failed())?;
    let mut file = tempfile::NamedTempFile::new_in(directory.place()).map_err(failed())?;
    file.write_all(id.to_string().as_bytes()).map_err(failed())?;
    let placed = file.persist(directory.place().join(name));
    placed.map(drop).map_err(|error| failed()(error.error))
}

/// Progress goes to standard error: the image's id is the result.
struct Terminal<'a> {
    layout: &'a Layout,
    quiet: bool,
}

impl Client for Terminal<'_> {
    fn say(&mut self, text: &str) {
        if !self.quiet {
            let text = exocell_cell::agent::printable_lines(text);
            // A closed pipe must not end the build.
            let _ = std::io::Write::write_all(&mut std::io::stderr(), text.as_bytes());
        }
    }

    fn output(&mut self, bytes: &[u8]) {
        if !self.quiet {
            // A terminal that is gone does not end the build.
            let _ = io::stderr().write_all(bytes);
        }
    }

    fn fetch(&mut self, name: &str) -> Result<(), CellError> {
        image::pull_as_told(self.layout, name, Pull::Always)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_and_secrets_are_read() {
        let texts =
            |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let read = arguments(&texts(&["a=1", "b=x=y", "EXOCELL_NO_SUCH_VARIABLE"]));
        assert_eq!(read, BTreeMap::from([("a".into(), "1".into()), ("b".into(), "x=y".into())]));
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::new(place.path().join("root"));
        let file = place.path().join("key");
        std::fs::write(&file, "k").unwrap();
        let text = format!("id=k,src={}", file.display());
        let [secret] = &secrets(&layout, &texts(&[&text])).unwrap()[..] else { panic!() };
        assert_eq!((secret.id.as_str(), &secret.path), ("k", &file.canonicalize().unwrap()));
        for (text, why) in [("src=x", "id"), ("id=k,env=V", "src=FILE"), ("id=k,src=/no", "/no")] {
            let error = secrets(&layout, &texts(&[text])).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
