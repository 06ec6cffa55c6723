//! `run -v` and `--mount`, in docker's words: folders, volumes, and files in memory.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use exocell_cell::images::Store;
use exocell_cell::parent::Parent;
use exocell_cell::settings::Tmpfs;
use exocell_cell::{CellError, CellSpec, Layout, plan};
use exocell_docker::{Held, VOLUMES_OF_IMAGE_MAX};

use super::network;
use crate::args::{RunArgs, StrengthArg};

/// One `--mount`.
#[derive(Debug, Default, PartialEq, Eq)]
struct Mount {
    kind: String,
    source: String,
    target: String,
    read_only: bool,
    /// Whether a volume stays as it is, whatever the image has there.
    no_copy: bool,
    /// Of files in memory, as `--tmpfs` has them.
    options: Vec<String>,
}

fn usage(text: &str, why: &str) -> CellError {
    CellError::Usage(format!("--mount: `{text}`: {why}"))
}

impl Mount {
    fn read(text: &str) -> Result<Self, CellError> {
        let mut mount = Self { kind: "volume".to_owned(), ..Self::default() };
        for field in text.split(',') {
            let (name, value) = field.split_once('=').unwrap_or((field, "true"));
            mount.set(name, value).map_err(|why| usage(text, &why))?;
        }
        if !mount.target.starts_with('/') {
            return Err(usage(text, "target is missing; name a path of the cell (target=/PATH)"));
        }
        let is_named = !mount.source.is_empty();
        match mount.kind.as_str() {
            "bind" if !is_named => {
                Err(usage(text, "source is missing; name a folder of this host"))
            }
            "tmpfs" if is_named => Err(usage(text, "files in memory have no source")),
            "bind" | "volume" if format!("{}{}", mount.source, mount.target).contains(':') => {
                Err(usage(text, "a path with a colon cannot be shared; share the folder above it"))
            }
            "bind" | "volume" | "tmpfs" => Ok(mount),
            _ => Err(usage(text, "type is bind, volume or tmpfs")),
        }
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name.to_ascii_lowercase().as_str() {
            "type" => value.clone_into(&mut self.kind),
            "source" | "src" => value.clone_into(&mut self.source),
            "target" | "dst" | "destination" => value.clone_into(&mut self.target),
            "readonly" | "ro" => self.read_only = truth(name, value)?,
            "volume-nocopy" => self.no_copy = truth(name, value)?,
            "tmpfs-size" => self.options.push(format!("size={value}")),
            "tmpfs-mode" => self.options.push(format!("mode={value}")),
            // What is shared is the same for all anyway.
            "consistency" => {}
            "bind-propagation" if matches!(value, "private" | "rprivate") => {}
            _ => {
                return Err(format!(
                    "{name} is not there; there are type, source, target, readonly, \
                     volume-nocopy, tmpfs-size and tmpfs-mode"
                ));
            }
        }
        Ok(())
    }
}

/// As docker's command reads it. What is none would leave a folder writable.
fn truth(name: &str, value: &str) -> Result<bool, String> {
    match value {
        "1" | "t" | "T" | "true" | "True" | "TRUE" => Ok(true),
        "0" | "f" | "F" | "false" | "False" | "FALSE" => Ok(false),
        _ => Err(format!("{name} is true or false, not {value:?}")),
    }
}

fn all(texts: &[String]) -> Result<Vec<Mount>, CellError> {
    texts.iter().map(|text| Mount::read(text)).collect()
}

/// What a cell shares with its host.
#[derive(Debug, Default)]
pub struct Folders {
    /// Flags, and folders as `--volume` has them.
    pub texts: Vec<(&'static str, String)>,
    /// Where a volume gets what the image has there.
    pub fills: Vec<PathBuf>,
    /// Its volumes: nobody removes them until this is dropped, by when the cell is to be listed.
    pub held: Vec<Held>,
}

/// Makes the volumes of a cell, and says how they are asked for with its other folders. Those
/// without a name are made for `owner`, a cell that may remove itself; without one there are none.
///
/// # Errors
/// A flag that is none; a volume cannot be made.
pub fn folders(
    layout: &Layout,
    args: &RunArgs,
    owner: Option<(&str, bool)>,
) -> Result<Folders, CellError> {
    let mut found = Folders::default();
    for text in &args.volume {
        if let Some((name, rest)) = named(text) {
            let source = found.volume(layout, "--volume", name, None)?;
            let target = rest.split(':').next().unwrap_or_default();
            found.fills.push(target.into());
            found.texts.push(("--volume", format!("{source}:{rest}")));
        } else if text.starts_with('/') && !text.contains(':') {
            found.add_anonymous(layout, "--volume", text, owner)?;
        } else {
            found.texts.push(("--volume", text.clone()));
        }
    }
    for mount in all(&args.mount)? {
        let rights = if mount.read_only { ":ro" } else { "" };
        let source = match (mount.kind.as_str(), mount.source.as_str()) {
            ("bind", source) => source.to_owned(),
            ("volume", "") => {
                found.add_anonymous(layout, "--mount", &mount.target, owner)?;
                // The last one is this.
                if mount.no_copy {
                    found.fills.pop();
                }
                continue;
            }
            ("volume", name) => found.volume(layout, "--mount", name, None)?,
            _ => continue,
        };
        if mount.kind == "volume" && !mount.no_copy {
            found.fills.push(mount.target.clone().into());
        }
        found.texts.push(("--mount", format!("{source}:{}{rights}", mount.target)));
    }
    let mut taken: BTreeSet<PathBuf> = found.targets();
    let in_memory = args.settings.tmpfs.iter().filter_map(|text| text.split(':').next());
    taken.extend(in_memory.map(plain));
    taken.extend(in_memory_of(&args.mount)?.iter().map(|tmpfs| plain(&tmpfs.target)));
    for target in image_volumes(layout, args)? {
        if owner.is_some() && taken.insert(plain(&target)) {
            found.add_anonymous(layout, "--volume", &target, owner)?;
        }
    }
    Ok(found)
}

/// The path, however it is written.
fn plain(target: &str) -> PathBuf {
    Path::new("/").join(target).components().collect()
}

/// The paths that the image wants to be volumes. A table says all that its cell may have, and a cell
/// all that one in it may: neither says that. A guest that runs gets no more folders.
fn image_volumes(layout: &Layout, args: &RunArgs) -> Result<Vec<String>, CellError> {
    let is_isolate = match args.strength {
        Some(strength) => matches!(strength, StrengthArg::Isolate),
        None => plan::is_module(Path::new(&args.image)),
    };
    let is_beside = network::within(&args.network)?.is_some();
    if is_isolate || is_beside || args.caps.is_some() || Parent::find()?.is_some() {
        return Ok(Vec::new());
    }
    // What is no image is told where it is to be one.
    let image = Store::open(layout.images()).and_then(|store| store.resolve(&args.image));
    let volumes: Vec<String> =
        image.map_or_else(|_| Vec::new(), |image| image.config.volumes.into_iter().collect());
    match volumes.len() > VOLUMES_OF_IMAGE_MAX {
        true => Err(CellError::Usage(format!(
            "the image {} wants {} volumes, at most {VOLUMES_OF_IMAGE_MAX} are made for one",
            args.image,
            volumes.len()
        ))),
        false => Ok(volumes),
    }
}

impl Folders {
    fn targets(&self) -> BTreeSet<PathBuf> {
        let target = |(_, text): &(&str, String)| text.split(':').nth(1).map(plain);
        self.texts.iter().filter_map(target).collect()
    }

    /// The folder of the volume `name`, which is made where it is missing: those of
    /// `exocell serve --docker`.
    fn volume(
        &mut self,
        layout: &Layout,
        flag: &str,
        name: &str,
        owner: Option<(&str, bool)>,
    ) -> Result<String, CellError> {
        exocell_docker::check_volume_name(name)
            .map_err(|error| CellError::Usage(format!("{flag}: {error}")))?;
        let (folder, held) = exocell_docker::make_volume(layout, name, owner)?;
        self.held.push(held);
        let shown = folder.to_str().filter(|text| !text.contains(':'));
        shown.map(str::to_owned).ok_or_else(|| {
            CellError::Usage(format!(
                "{flag}: the volume lies at {}, which cannot be written here; choose another \
                 --root",
                folder.display()
            ))
        })
    }

    fn add_anonymous(
        &mut self,
        layout: &Layout,
        flag: &'static str,
        target: &str,
        owner: Option<(&str, bool)>,
    ) -> Result<(), CellError> {
        if owner.is_none() {
            return Err(CellError::Usage(format!(
                "{flag}: {target}: the cells of a pool have no volumes of their own; name one \
                 (--mount type=volume,source=NAME,target={target})"
            )));
        }
        let target = plain(target);
        // As docker names them.
        let name = CellSpec::new_id()? + &CellSpec::new_id()?;
        let source = self.volume(layout, flag, &name, owner)?;
        self.texts.push((flag, format!("{source}:{}", target.display())));
        self.fills.push(target);
        Ok(())
    }
}

/// The files in memory among `texts`.
pub fn in_memory_of(texts: &[String]) -> Result<Vec<Tmpfs>, CellError> {
    let mut found = Vec::new();
    for mut mount in all(texts)?.into_iter().filter(|mount| mount.kind == "tmpfs") {
        if mount.read_only {
            mount.options.push("ro".to_owned());
        }
        let options = mount.options.join(",");
        let text =
            if options.is_empty() { mount.target } else { format!("{}:{options}", mount.target) };
        let tmpfs = Tmpfs::read(&text);
        found.push(tmpfs.map_err(|error| CellError::Usage(format!("--mount: {error}")))?);
    }
    Ok(found)
}

/// The volume that `NAME:GUEST[:OPTIONS]` names, and the rest. A word is a volume's name, as docker
/// has it, whatever folder is here.
fn named(text: &str) -> Option<(&str, &str)> {
    let (name, rest) = text.split_once(':')?;
    let is_word = !name.is_empty() && !name.contains('/') && !name.starts_with('.');
    (is_word && rest.starts_with('/')).then_some((name, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_in_dockers_words() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let texts = [
            "type=bind,src=/a,dst=/b,readonly=TRUE",
            "type=bind,source=./a,target=/c,bind-propagation=rprivate",
            "source=data,destination=/d,ro=false",
            "type=tmpfs,target=/t,tmpfs-size=1m,tmpfs-mode=1777",
        ]
        .map(str::to_owned);
        let folders = folders(&layout, &args(&texts), None).unwrap();
        let volume = root.path().join("docker/volumes/data");
        let shown = format!("{}:/d", volume.display());
        let found: Vec<&str> = folders.texts.iter().map(|(_, text)| text.as_str()).collect();
        assert_eq!(found, ["/a:/b:ro", "./a:/c", shown.as_str()]);
        assert_eq!(folders.fills, [Path::new("/d")]);
        assert!(volume.is_dir());
        let tmpfs = in_memory_of(&texts).unwrap();
        assert_eq!((tmpfs.len(), tmpfs[0].target.as_str()), (1, "/t"));
    }

    /// `run` with these words of `--mount`.
    fn args(mounts: &[String]) -> RunArgs {
        use clap::Parser;
        let words = mounts.iter().flat_map(|text| ["--mount", text]);
        let words = ["exocell", "run"].into_iter().chain(words).chain(["no/image"]);
        match crate::args::Cli::parse_from(words).command {
            crate::args::Command::Run(args) => *args,
            _ => panic!("it is another command"),
        }
    }

    #[test]
    fn a_volume_without_a_name_is_made_for_its_cell() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let mut args = args(&["type=volume,target=/a/,volume-nocopy".to_owned()]);
        args.volume = vec!["/b".to_owned()];
        folders(&layout, &args, None).unwrap_err();
        let found = folders(&layout, &args, Some(("0123", true))).unwrap();
        assert_eq!(found.texts.len(), 2);
        for (_, text) in &found.texts {
            let (volume, target) = text.split_once(':').unwrap();
            assert!(Path::new(volume).is_dir() && ["/a", "/b"].contains(&target), "{text}");
        }
        drop(found);
        exocell_docker::discard_volumes(&layout, "4567");
        let left = || std::fs::read_dir(root.path().join("docker/volumes")).unwrap().count();
        assert_eq!(left(), 2);
        exocell_docker::discard_volumes(&layout, "0123");
        assert_eq!(left(), 0);
    }

    #[test]
    fn a_mount_that_is_none_is_refused_by_what_is_wrong() {
        for (text, word) in [
            ("type=bind,src=/a", "target"),
            ("type=bind,dst=/a", "source"),
            ("type=npipe,src=/a,dst=/b", "bind, volume or tmpfs"),
            ("type=tmpfs,src=/a,dst=/b", "no source"),
            ("type=bind,src=/a:b,dst=/b", "colon"),
            ("type=bind,src=/a,dst=/b,bind-propagation=shared", "bind-propagation"),
            ("type=bind,src=/a,dst=/b,readonly=yes", "readonly"),
            ("type=bind,src=/a,dst=/b,ro=", "ro is true or false"),
        ] {
            let error = Mount::read(text).unwrap_err().to_string();
            assert!(error.starts_with("--mount: ") && error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_word_is_a_volumes_name() {
        assert_eq!(named("data:/x:ro"), Some(("data", "/x:ro")));
        // The directory in which tests run has a folder of this name.
        assert_eq!(named("src:/x"), Some(("src", "/x")));
        for folder in ["./no-such-folder:/x", "/a:/x", "/a", "a", ":/x", "a:x"] {
            assert_eq!(named(folder), None, "{folder}");
        }
    }
}
