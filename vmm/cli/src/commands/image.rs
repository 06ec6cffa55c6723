//! `exocell image`: the image store.

use std::path::Path;

use exocell_cell::agent::printable;
use exocell_cell::images::{
    Credentials, ImageConfig, ImageRecord, ImportLimits, Progress, ProgressEvent, ProxyOptions,
    Reference, RegistryOptions, Source, Store,
};
use exocell_cell::{CellError, Layout, Record, Strength, commit, unpack};
use serde_json::json;

use super::print_json;
use super::run::must_run;
use crate::args::{CommitArgs, ImageCommand};
use crate::progress::Bar;
use crate::show::{self, say};

/// Name and password for `image pull`, as NAME:PASSWORD.
const CREDENTIALS_VARIABLE: &str = "EXOCELL_REGISTRY_AUTH";
/// Who may have them, as HOST,HOST: registries by the names that images have, and login servers.
const HOSTS_VARIABLE: &str = "EXOCELL_REGISTRY_AUTH_HOSTS";

pub fn image(layout: &Layout, command: ImageCommand) -> Result<u8, CellError> {
    let store = Store::open(layout.images())?;
    match command {
        ImageCommand::Import { path, tag } => import(&store, &path, tag.as_deref())?,
        ImageCommand::Pull { reference, plain_http } => pull(&store, &reference, plain_http)?,
        ImageCommand::Ls { json } => list(&store, json)?,
        ImageCommand::Rm { images } => {
            for name in &images {
                store.remove(name, false)?;
                say!("{name}");
            }
        }
        ImageCommand::Inspect { images } => {
            for name in &images {
                say!("{}", store.inspect(name)?);
            }
        }
        ImageCommand::Prune => {
            let removed = store.prune()?;
            let freed = removed.iter().map(|record| record.size_bytes).sum();
            say!("{} images removed, {} freed", removed.len(), show::bytes(freed));
        }
    }
    Ok(0)
}

fn import(store: &Store, path: &Path, tag: Option<&str>) -> Result<(), CellError> {
    let source = Source::detect(path, ImageConfig::default())?;
    let tag = tag.map(str::parse::<Reference>).transpose()?;
    finish(run(store, &source, tag.as_ref())?)
}

fn pull(store: &Store, reference: &str, plain_http: bool) -> Result<(), CellError> {
    let reference: Reference = reference.parse()?;
    let proxy = ProxyOptions::read(|name| std::env::var(name).ok());
    let hosts = hosts(&std::env::var(HOSTS_VARIABLE).unwrap_or_default());
    let credentials = credentials()?.filter(|_| may_have(&reference.registry, &hosts));
    let options = RegistryOptions { plain_http, credentials, login_hosts: hosts, proxy };
    finish(run(store, &Source::Registry { reference, options }, None)?)
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
    let tag: Reference = args.tag.parse()?;
    let (record, spec, status) = Record::find(layout, &args.cell)?;
    must_run(&record, status.state)?;
    if spec.strength == Strength::Isolate {
        let key = &args.cell;
        return Err(CellError::Usage(format!("{key} is an isolate: it has no file system")));
    }
    finish(show(&mut |progress| {
        commit::commit(layout, &record, &spec.image, Some(&tag), progress)
    })?)?;
    Ok(0)
}

fn run(store: &Store, source: &Source, tag: Option<&Reference>) -> Result<ImageRecord, CellError> {
    show(&mut |progress| {
        Ok(unpack::import(store, source, tag, &ImportLimits::default(), progress)?)
    })
}

/// Shows how far `import` is.
fn show(
    import: &mut dyn FnMut(&mut dyn Progress) -> Result<ImageRecord, CellError>,
) -> Result<ImageRecord, CellError> {
    let bar = Bar::new(0, "{spinner} {msg:24} {bytes} {bytes_per_sec} {elapsed}");
    let mut done = 0;
    let result = import(&mut |event: ProgressEvent<'_>| match event {
        ProgressEvent::Layer { index, count, .. } => {
            bar.step(&format!("layer {} of {count}", index + 1));
        }
        ProgressEvent::Bytes(bytes) => {
            done += bytes;
            bar.set(done, None);
        }
        ProgressEvent::Skipped { path, why } => {
            eprintln!("exocell: left out {}: {}", printable(path), printable(why));
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

fn list(store: &Store, json: bool) -> Result<(), CellError> {
    let records = store.list()?;
    if json {
        for record in &records {
            let row = json!({
                "id": record.id.to_string(),
                "tags": record.tags,
                "created": record.created,
                "size_bytes": record.size_bytes,
                "architecture": record.architecture,
            });
            print_json(&row, false)?;
        }
        return Ok(());
    }
    let rows: Vec<Vec<String>> = records.iter().map(columns).collect();
    show::table(&["IMAGE", "ID", "SIZE", "IMPORTED"], &rows);
    Ok(())
}

fn columns(record: &ImageRecord) -> Vec<String> {
    let id = record.id.to_string();
    let short = id.trim_start_matches("sha256:").chars().take(12).collect();
    let name = if record.tags.is_empty() { "<none>".to_owned() } else { record.tags.join(", ") };
    vec![name, short, show::bytes(record.size_bytes), show::ago(record.imported * 1000)]
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
