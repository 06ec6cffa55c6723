//! What becomes of an image that was built (`--output`): a name in the store, or files that the
//! client takes.

use std::collections::BTreeMap;
use std::io::{self, Write};

use exocell_cell::images::{Reference, Rootfs, private};
use exocell_cell::{archive, compose};

use super::contexts::Client;
use super::work::status;
use crate::build::Built;
use crate::build::call::tell_tags;
use crate::containers::Containers;
use crate::control_messages::Exporter;
use crate::grpc::{Code, Result, Status};
use crate::progress::Progress;
use crate::save;
use crate::session::messages::Chunk;
use crate::session::{Patient, delivery};

/// Outputs of one build.
const OUTPUTS_MAX: usize = 16;
/// Names of one image.
const TAGS_MAX: usize = 64;
/// Bytes of one message with a part of an archive.
const CHUNK_BYTES: usize = 256 << 10;

/// One output.
#[derive(Debug, PartialEq, Eq)]
pub enum Output {
    /// An image with these names.
    Image(Vec<Reference>),
    /// The same, as an archive like those of `docker save`.
    Archive(Vec<Reference>),
    /// Its files as an archive.
    Tar,
    /// Its files.
    Directory,
}

/// Reads what the client wants.
///
/// # Errors
/// What is not there, by its name.
pub fn read(exporters: &[Exporter]) -> Result<Vec<Output>> {
    if exporters.len() > OUTPUTS_MAX {
        return Err(Status::invalid(format!("a build has at most {OUTPUTS_MAX} outputs")));
    }
    exporters.iter().map(output).collect()
}

fn output(exporter: &Exporter) -> Result<Output> {
    let Exporter { kind, attributes } = exporter;
    let known: &[&str] = match kind.as_str() {
        // Docker's own clients push with the credentials that they have, by another call.
        "moby" => &["name", "push", "unpack", "prefer-image-digest"],
        "image" => &["name", "unpack", "prefer-image-digest"],
        "docker" => &["name", "dest", "tar"],
        "tar" | "local" => &["dest", "mode"],
        other => {
            return Err(Status::unsupported(
                format!("--output type={other}"),
                "use image, docker, tar or local",
            ));
        }
    };
    let says = |value: &str| !matches!(value, "" | "false" | "0");
    for (name, value) in attributes {
        if says(value) && !known.contains(&name.as_str()) {
            return Err(Status::unsupported(
                format!("--output type={kind},{name}={value}"),
                "leave it out",
            ));
        }
    }
    let get = |name: &str| attributes.get(name).map(String::as_str).unwrap_or_default();
    if let mode @ ("delete" | "sync") = get("mode") {
        return Err(Status::unsupported(
            format!("--output type={kind},mode={mode}"),
            "use another directory, or remove what is in it first",
        ));
    }
    if kind == "docker" && attributes.contains_key("tar") && !says(get("tar")) {
        return Err(Status::unsupported("--output type=docker,tar=false", "take the archive"));
    }
    let names = get("name").split(',').filter(|name| !name.is_empty());
    let names = names.map(|name| name.parse().map_err(|error| Status::invalid(format!("{error}"))));
    let names: Vec<Reference> = names.collect::<Result<_>>()?;
    if names.len() > TAGS_MAX {
        return Err(Status::invalid(format!("an image gets at most {TAGS_MAX} tags")));
    }
    Ok(match kind.as_str() {
        "docker" => Output::Archive(names),
        "tar" => Output::Tar,
        "local" => Output::Directory,
        _ => Output::Image(names),
    })
}

/// Makes all outputs of an image; what the client is told of it. Blocks.
///
/// # Errors
/// One cannot be made, or the client does not take it.
pub fn make(
    client: &Client<'_>,
    built: &Built,
    outputs: &[Output],
    name: &str,
) -> Result<BTreeMap<String, String>> {
    let mut progress = Progress::new(client.job.journal.clone(), name);
    let mut said = BTreeMap::new();
    let made = outputs.iter().enumerate().try_for_each(|(number, output)| {
        progress.begin(match output {
            Output::Image(_) => "exporting to image",
            Output::Archive(_) => "exporting to docker image format",
            Output::Tar => "exporting to client tarball",
            Output::Directory => "exporting to client directory",
        });
        match output {
            Output::Image(names) => {
                let id = keep(client, built, names, &progress)?;
                for key in ["containerimage.digest", "containerimage.config.digest"] {
                    said.insert(key.to_owned(), id.clone());
                }
                if !names.is_empty() {
                    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
                    said.insert("image.name".to_owned(), names.join(","));
                }
                Ok(())
            }
            Output::Archive(names) => {
                let id = keep(client, built, names, &progress)?;
                let wanted = match names.is_empty() {
                    true => vec![id],
                    false => names.iter().map(ToString::to_string).collect(),
                };
                let mut line = begin(client, number)?;
                save::save_to(client.server.layout(), &wanted, &mut Archive(&mut line))
                    .map_err(|error| Status::new(Code::Unknown, error.to_string()))?;
                line.finish().map_err(failed)
            }
            Output::Tar => {
                let files = built.files().map_err(status)?;
                let mut line = begin(client, number)?;
                files_of(&files, &mut Archive(&mut line))?;
                line.finish().map_err(failed)
            }
            Output::Directory => {
                let files = built.files().map_err(status)?;
                let folder = Containers::root(client.server.layout());
                let spool = private::folder(&folder).and_then(|()| tempfile::tempfile_in(folder));
                let mut spool = spool.map_err(failed)?;
                files_of(&files, &mut spool)?;
                let mut line = begin(client, number)?;
                delivery::send(&mut line, &spool).and_then(|()| line.finish()).map_err(failed)
            }
        }
    });
    progress.end(made.as_ref().err().map(|status| status.words.as_str()));
    made.map(|()| said)
}

fn failed(error: io::Error) -> Status {
    Status::new(Code::Unknown, error.to_string())
}

fn begin<'a>(client: &'a Client<'_>, number: usize) -> Result<Patient<'a>> {
    let exchange = client.handle.block_on(client.session.output(number))?;
    Ok(client.patient(exchange))
}

/// Keeps the image; its id.
fn keep(
    client: &Client<'_>,
    built: &Built,
    names: &[Reference],
    progress: &Progress,
) -> Result<String> {
    let id = built.keep(names).map_err(status)?.to_string();
    progress.part(&format!("writing image {id}"));
    for name in names {
        progress.part(&format!("naming to {name}"));
    }
    tell_tags(client.server, names, &id);
    Ok(id)
}

/// Writes an archive of all files, without what gives rights on a host.
fn files_of(files: &Rootfs, out: &mut dyn Write) -> Result<()> {
    let names = archive::Names::of("/");
    let packed = |to| compose::pack(files, ".", &to).map_err(io::Error::from);
    archive::passed(&names, packed, out)
        .map_err(|error| Status::new(Code::Unknown, error.to_string()))
}

/// Sends an archive in chunks.
struct Archive<'a, 'p>(&'a mut Patient<'p>);

impl Write for Archive<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let data = bytes[..bytes.len().min(CHUNK_BYTES)].to_vec();
        let count = data.len();
        if count > 0 {
            self.0.send(&Chunk { data })?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(kind: &str, attributes: &[(&str, &str)]) -> Result<Output> {
        let attributes = attributes.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned()));
        let exporter = Exporter { kind: kind.to_owned(), attributes: attributes.collect() };
        read(&[exporter]).map(|mut all| all.remove(0))
    }

    #[test]
    fn outputs_are_known_or_refused_by_name() {
        let names = vec!["a:1".parse().unwrap(), "b".parse().unwrap()];
        assert_eq!(one("moby", &[("name", "a:1,b"), ("push", "true")]), Ok(Output::Image(names)));
        assert_eq!(one("local", &[("dest", "out")]), Ok(Output::Directory));
        assert_eq!(one("tar", &[]), Ok(Output::Tar));
        for (kind, name, value) in [
            ("oci", "", ""),
            ("image", "push", "true"),
            ("local", "mode", "delete"),
            ("local", "platform-split", "true"),
            ("docker", "tar", "false"),
            ("moby", "annotation.x", "y"),
            ("moby", "name", "Not A Name"),
        ] {
            let refused = one(kind, &[(name, value)]).unwrap_err().words;
            assert!(refused.contains(if name == "name" { value } else { kind }), "{refused}");
        }
    }
}
