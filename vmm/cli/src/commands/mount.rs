//! `run --mount`, in docker's words: folders, volumes, and files in memory.

use std::path::Path;

use exocell_cell::images::private;
use exocell_cell::settings::Tmpfs;
use exocell_cell::{CellError, Layout};

/// One `--mount`.
#[derive(Debug, Default, PartialEq, Eq)]
struct Mount {
    kind: String,
    source: String,
    target: String,
    read_only: bool,
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
            "bind" | "volume" if !is_named => Err(usage(
                text,
                "source is missing; name a folder of this host (type=bind) or a volume",
            )),
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
            "readonly" | "ro" => self.read_only = matches!(value, "true" | "1"),
            "tmpfs-size" => self.options.push(format!("size={value}")),
            "tmpfs-mode" => self.options.push(format!("mode={value}")),
            // What is shared is the same for all anyway.
            "consistency" => {}
            "bind-propagation" if matches!(value, "private" | "rprivate") => {}
            _ => {
                return Err(format!(
                    "{name} is not there; there are type, source, target, readonly, tmpfs-size and tmpfs-mode"
                ));
            }
        }
        Ok(())
    }
}

fn all(texts: &[String]) -> Result<Vec<Mount>, CellError> {
    texts.iter().map(|text| Mount::read(text)).collect()
}

/// The folders and volumes among `texts`, as `--volume` has them.
pub fn folders(layout: &Layout, texts: &[String]) -> Result<Vec<String>, CellError> {
    let mut found = Vec::new();
    for mount in all(texts)? {
        let rights = if mount.read_only { ":ro" } else { "" };
        let source = match mount.kind.as_str() {
            "bind" => mount.source.clone(),
            "volume" => volume(layout, &mount.source)?,
            _ => continue,
        };
        found.push(format!("{source}:{}{rights}", mount.target));
    }
    Ok(found)
}

/// The files in memory among `texts`.
pub fn in_memory(texts: &[String]) -> Result<Vec<Tmpfs>, CellError> {
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

/// The folder of the volume `name`, which is made where it is missing: those of
/// `exocell serve --docker`.
fn volume(layout: &Layout, name: &str) -> Result<String, CellError> {
    exocell_docker::check_volume_name(name)
        .map_err(|error| CellError::Usage(format!("--mount: {error}")))?;
    let folder = exocell_docker::volumes(layout).join(name);
    // One that is there is as its cells left it.
    if !folder.is_dir() {
        private::folder(&folder)
            .map_err(CellError::host(format!("cannot make the volume {}", folder.display())))?;
    }
    let shown = folder.to_str().filter(|text| !text.contains(':'));
    shown.map(str::to_owned).ok_or_else(|| {
        CellError::Usage(format!(
            "--mount: the volume lies at {}, which cannot be written here; choose another --root",
            folder.display()
        ))
    })
}

/// A word without a `/` is a volume's name for docker, and a folder's here.
pub fn check_volume(text: &str) -> Result<(), CellError> {
    let Some((host, guest)) = text.split_once(':') else { return Ok(()) };
    let is_word = !host.is_empty() && !host.contains('/') && !host.starts_with('.');
    if !is_word || Path::new(host).exists() {
        return Ok(());
    }
    let guest = guest.split(':').next().unwrap_or_default();
    Err(CellError::Usage(format!(
        "--volume: there is no folder {host} here; make it, or take the volume of that name \
         (--mount type=volume,source={host},target={guest})"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_in_dockers_words() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        let texts = [
            "type=bind,src=/a,dst=/b,readonly",
            "type=bind,source=./a,target=/c,bind-propagation=rprivate",
            "source=data,destination=/d,ro=false",
            "type=tmpfs,target=/t,tmpfs-size=1m,tmpfs-mode=1777",
        ]
        .map(str::to_owned);
        let volume = exocell_docker::volumes(&layout).join("data");
        let folders = folders(&layout, &texts).unwrap();
        let shown = format!("{}:/d", volume.display());
        assert_eq!(folders, ["/a:/b:ro", "./a:/c", shown.as_str()]);
        assert!(volume.is_dir());
        let tmpfs = in_memory(&texts).unwrap();
        assert_eq!((tmpfs.len(), tmpfs[0].target.as_str()), (1, "/t"));
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
        ] {
            let error = Mount::read(text).unwrap_err().to_string();
            assert!(error.starts_with("--mount: ") && error.contains(word), "{error}");
        }
        let refused = check_volume("no-such-folder:/x:ro").unwrap_err().to_string();
        assert!(refused.contains("source=no-such-folder,target=/x"), "{refused}");
        check_volume("./no-such-folder:/x").unwrap();
    }
}
