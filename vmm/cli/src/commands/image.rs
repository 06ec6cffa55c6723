//! `exocell image`: the image store.

use std::io::{self, IsTerminal, Seek};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use exocell_cell::agent::printable;
use exocell_cell::granted::Links;
use exocell_cell::images::{
    Credentials, ImageConfig, ImageError, ImageRecord, ImportLimits, Note, Progress, ProgressEvent,
    ProxyOptions, Reference, RegistryOptions, Source, Store,
};
use exocell_cell::unpack::{self, Archive};
use exocell_cell::{CellError, Layout, Record, commit, plan};
use exocell_docker::build;

use super::image_list;
use super::reach::Reach;
use super::system::agreed;
use crate::args::{CommitArgs, ImageCommand, ImageRmArgs, Pull, PushArgs, SaveArgs};
use crate::progress::Bar;
use crate::show::{self, say};

/// Name and password for `image pull` and `image push`, as NAME:PASSWORD.
const CREDENTIALS_VARIABLE: &str = "EXOCELL_REGISTRY_AUTH";
/// Who may have them, as HOST,HOST: registries by the names that images have, and login servers.
const HOSTS_VARIABLE: &str = "EXOCELL_REGISTRY_AUTH_HOSTS";

pub fn image(layout: &Layout, command: ImageCommand) -> Result<u8, CellError> {
    let store = Store::open(layout.images())?;
    match command {
        ImageCommand::Import(args) => import(layout, &store, &args.path, args.tag.as_deref())?,
        ImageCommand::Pull(args) => pull(&store, &args.reference, args.plain_http)?,
        ImageCommand::Push(args) => push(layout, &args)?,
        ImageCommand::Ls(args) => image_list::ls(&store, &args)?,
        ImageCommand::Rm(args) => return remove(&store, &args),
        ImageCommand::Tag(args) => store.tag(&args.image, &args.name.parse()?)?,
        ImageCommand::Save(args) => save(layout, &args)?,
        ImageCommand::Load(args) => load(layout, &store, args.input.as_deref())?,
        ImageCommand::Inspect(args) => image_list::inspect(&store, &args)?,
        ImageCommand::History(args) => image_list::history(&store, &args)?,
        ImageCommand::Prune(args) => {
            let which = match args.all {
                true => "all images that no cell uses",
                false => "all images without a name that no cell uses",
            };
            if args.force || agreed(&format!("This removes {which}."))? {
                prune(layout, &store, args.all)?;
            }
        }
    }
    Ok(0)
}

/// Each of the images; what fails of one is no reason to leave the others.
fn remove(store: &Store, args: &ImageRmArgs) -> Result<u8, CellError> {
    let mut failed = Ok(0);
    for name in &args.images {
        match remove_when_released(store, name, args.force) {
            Ok(()) => say!("{name}"),
            Err(ImageError::NotFound { .. }) if args.force => {}
            Err(error) => {
                if let Err(before) = std::mem::replace(&mut failed, Err(error.into())) {
                    show::complain(&before);
                }
            }
        }
    }
    failed
}

/// How long the supervisor of a cell that has ended may hold its image, and between two looks.
const RELEASE_MAX: Duration = Duration::from_secs(2);
const RELEASE_POLL: Duration = Duration::from_millis(10);

/// A supervisor lets go of its image at its very end, a moment after its operator was told of it.
fn remove_when_released(store: &Store, name: &str, force: bool) -> Result<(), ImageError> {
    let until = Instant::now() + RELEASE_MAX;
    loop {
        match store.remove(name, force) {
            Err(ImageError::InUse { .. }) if Instant::now() < until => {
                std::thread::sleep(RELEASE_POLL);
            }
            result => return result.map(drop),
        }
    }
}

/// Cells that have ended hold no image, but one that may start again wants its own.
pub fn prune(layout: &Layout, store: &Store, all: bool) -> Result<(), CellError> {
    let before = store.listed_bytes()?;
    let mut removed = store.prune()?;
    if all {
        let cells = Record::all(layout)?;
        let images = cells.iter().map(|(_, spec, _)| spec.image_name());
        let used: Vec<_> = images.filter_map(|name| store.resolve(name).ok()).collect();
        let is_used = |image: &ImageRecord| used.iter().any(|used| used.id == image.id);
        let kept = |image: &ImageRecord| is_used(image) || exocell_docker::is_tenants(image);
        for image in store.list()?.into_iter().filter(|image| !kept(image)) {
            match remove_when_released(store, &image.id.to_string(), true) {
                Ok(()) => removed.push(image),
                Err(ImageError::InUse { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    let freed = before.saturating_sub(store.listed_bytes()?);
    say!("{} images removed, {} freed", removed.len(), show::bytes(freed));
    Ok(())
}

/// To a file of the operator's own, or where standard output leads.
fn save(layout: &Layout, args: &SaveArgs) -> Result<(), CellError> {
    let Some(path) = &args.output else {
        if io::stdout().is_terminal() {
            return Err(CellError::Usage(
                "an archive is nothing for a terminal; name a file (-o FILE) or redirect it"
                    .to_owned(),
            ));
        }
        return exocell_docker::save_to(layout, &args.images, &mut io::stdout());
    };
    let what = || format!("cannot write {}", path.display());
    let (directory, name) = Links::outside(layout).place(path).map_err(CellError::host(what()))?;
    // Whole or not there at all.
    let mut file =
        tempfile::NamedTempFile::new_in(directory.place()).map_err(CellError::host(what()))?;
    exocell_docker::save_to(layout, &args.images, &mut file)?;
    file.persist(directory.place().join(name))
        .map_err(|error| CellError::host(what())(error.error))?;
    Ok(())
}

fn import(layout: &Layout, store: &Store, path: &Path, tag: Option<&str>) -> Result<(), CellError> {
    let source = Source::detect(&real(layout, path)?, ImageConfig::default())?;
    if let (Source::Archive(path), None) = (&source, tag) {
        let images = import_all(store, Archive::open(path)?)?;
        images.iter().for_each(|(id, _)| say!("{id}"));
        return Ok(());
    }
    let tag = tag.map(str::parse::<Reference>).transpose()?;
    finish(run(store, &source, tag.as_ref())?)
}

/// Where `path` leads to, by no link that a cell can have made.
fn real(layout: &Layout, path: &Path) -> Result<PathBuf, CellError> {
    let real = Links::outside(layout).real(path);
    real.map_err(CellError::host(format!("cannot read {}", path.display())))
}

fn load(layout: &Layout, store: &Store, input: Option<&Path>) -> Result<(), CellError> {
    let archive = match input {
        Some(path) => Archive::open(&real(layout, path)?)?,
        None => piped()?,
    };
    for (id, name) in import_all(store, archive)? {
        say!("Loaded image: {}", name.unwrap_or(id));
    }
    Ok(())
}

/// An archive on standard input.
fn piped() -> Result<Archive, CellError> {
    if io::stdin().is_terminal() {
        return Err(CellError::Usage(
            "standard input is a terminal; name an archive (-i FILE) or redirect one".to_owned(),
        ));
    }
    let failed = || CellError::host("cannot read the archive");
    let mut file = tempfile::tempfile().map_err(failed())?;
    io::copy(&mut io::stdin(), &mut file).map_err(failed())?;
    file.rewind().map_err(failed())?;
    Ok(Archive::of_file(file, Path::new("standard input")))
}

/// Imports the images of an archive under each name that it has for them; ids and names.
fn import_all(
    store: &Store,
    mut archive: Archive,
) -> Result<Vec<(String, Option<String>)>, CellError> {
    let limits = ImportLimits::default();
    let names = archive.names(store, &limits)?;
    let tags = names.iter().map(|name| name.parse().map(Some));
    let mut tags = tags.collect::<Result<Vec<Option<Reference>>, ImageError>>()?;
    if tags.is_empty() {
        tags.push(None);
    }
    let mut import = |tag: Option<Reference>| {
        let image =
            show(&mut |progress| Ok(archive.import(store, tag.as_ref(), &limits, progress)?))?;
        Ok((image.id.to_string(), tag.map(|tag| tag.to_string())))
    };
    tags.into_iter().map(&mut import).collect()
}

fn pull(store: &Store, reference: &str, plain_http: bool) -> Result<(), CellError> {
    finish(fetch(store, reference, plain_http)?)
}

fn fetch(store: &Store, reference: &str, plain_http: bool) -> Result<ImageRecord, CellError> {
    let reference: Reference = reference.parse()?;
    let options = options(&reference, plain_http)?;
    run(store, &Source::Registry { reference, options }, None)
}

/// Says the digest that the registry has it by.
fn push(layout: &Layout, args: &PushArgs) -> Result<(), CellError> {
    let reference: Reference = args.reference.parse()?;
    let options = options(&reference, args.plain_http)?;
    let (mut there, mut all) = (0, 0);
    let pushed = show(&mut |progress| {
        let mut told = |event: ProgressEvent<'_>| {
            match event {
                ProgressEvent::Layer { count, .. } => all = count,
                ProgressEvent::Present { .. } => there += 1,
                _ => {}
            }
            progress.event(event);
        };
        exocell_docker::push_to(layout, &reference, &options, &mut told)
    })?;
    match there {
        0 => {}
        _ if all == 1 => crate::show::tell!("exocell: the registry had the layer already"),
        there => {
            crate::show::tell!("exocell: the registry had {there} of {all} layers already");
        }
    }
    say!("{}", pushed.digest);
    Ok(())
}

/// How the registry of `reference` is spoken to, with what the environment has for it.
fn options(reference: &Reference, plain_http: bool) -> Result<RegistryOptions, CellError> {
    let proxy = ProxyOptions::read(|name| std::env::var(name).ok());
    let hosts = hosts(&std::env::var(HOSTS_VARIABLE).unwrap_or_default());
    let credentials = credentials()?.filter(|_| may_have(&reference.registry, &hosts));
    let own = RegistryOptions::default();
    Ok(RegistryOptions { plain_http, credentials, login_hosts: hosts, proxy, ..own })
}

/// Pulls the image of a cell that is to be, where its command says so.
pub fn pull_as_told(layout: &Layout, image: &str, when: Pull) -> Result<(), CellError> {
    if when == Pull::Never || plan::is_module(Path::new(image)) {
        return Ok(());
    }
    let store = Store::open(layout.images())?;
    if when == Pull::Missing && store.resolve(image).is_ok() {
        return Ok(());
    }
    // Its id is nothing that the program writes.
    fetch(&store, image, false).map(drop)
}

fn credentials() -> Result<Option<Credentials>, CellError> {
    let Ok(text) = std::env::var(CREDENTIALS_VARIABLE) else { return Ok(None) };
    let (username, password) = text
        .split_once(':')
        .ok_or_else(|| CellError::Usage(format!("{CREDENTIALS_VARIABLE} is not NAME:PASSWORD")))?;
    Ok(Some(Credentials { username: username.to_owned(), password: password.to_owned() }))
}

fn hosts(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|host| !host.is_empty()).map(str::to_owned).collect()
}

/// Without a list it is the registry that the command names, and that alone.
fn may_have(registry: &str, hosts: &[String]) -> bool {
    hosts.is_empty() || hosts.iter().any(|host| host.eq_ignore_ascii_case(registry))
}

/// `exocell commit`
pub fn commit(layout: &Layout, args: &CommitArgs) -> Result<u8, CellError> {
    let tag = args.tag.as_ref().map(|tag| tag.parse::<Reference>()).transpose()?;
    if args.pause && !args.no_pause {
        return Err(CellError::Usage(
            "--pause is not there: the cell's programs go on while it is committed; a \
             commit after exocell stop has nothing half written"
                .to_owned(),
        ));
    }
    let note = Note { author: args.author.clone(), comment: args.message.clone(), parent: None };
    let reach = Reach::cell(layout, &args.cell)?;
    let store = Store::open(layout.images())?;
    let started = build::as_started(&store.inspect(reach.spec.image_name())?, &reach.spec)
        .map_err(|error| CellError::Usage(error.to_string()))?;
    let changed = build::changed(&started, &args.change)
        .map_err(|error| CellError::Usage(format!("--change: {error}")))?;
    let config = ImageConfig::of_document(&changed)?;
    finish(show(&mut |progress| {
        commit::commit(layout, &reach.record, (&config, &note), tag.as_ref(), progress)
    })?)?;
    Ok(0)
}

fn run(store: &Store, source: &Source, tag: Option<&Reference>) -> Result<ImageRecord, CellError> {
    show(&mut |progress| {
        Ok(unpack::import(store, source, tag, &ImportLimits::default(), progress)?)
    })
}

/// Shows how far `work` is.
fn show<T>(
    work: &mut dyn FnMut(&mut dyn Progress) -> Result<T, CellError>,
) -> Result<T, CellError> {
    let bar = Bar::new(0, "{spinner} {msg:24} {bytes} {bytes_per_sec} {elapsed}");
    let mut done = 0;
    let result = work(&mut |event: ProgressEvent<'_>| match event {
        ProgressEvent::Layer { index, count, .. } => {
            bar.step(&format!("layer {} of {count}", index + 1));
        }
        ProgressEvent::Bytes(bytes) => {
            done += bytes;
            bar.set(done, None);
        }
        ProgressEvent::Skipped { path, why } => {
            crate::show::tell!("exocell: left out {}: {}", printable(path), printable(why));
        }
        ProgressEvent::Finishing => bar.step("writing the file system"),
        _ => {}
    });
    bar.finish();
    result
}

fn finish(record: ImageRecord) -> Result<(), CellError> {
    say!("{}", record.id);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_for_the_registries_that_are_listed() {
        assert!(may_have("any.example:5000", &hosts("")));
        let listed = hosts("docker.io, Login.example,,corp.example:5000");
        for (registry, may) in
            [("docker.io", true), ("corp.example:5000", true), ("other.example", false)]
        {
            assert_eq!(may_have(registry, &listed), may, "{registry}");
        }
    }
}
