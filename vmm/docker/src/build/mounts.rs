//! What a `RUN` has beside its image: folders of the host that the build has made for it, files
//! that whoever builds has named, and memory.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use exocell_cell::CellError;
use exocell_cell::agent::FileCopy;
use exocell_cell::archive;
use exocell_cell::compose;
use exocell_cell::images::compose::Selection;
use exocell_cell::images::dockerfile::{Dockerfile, Heredoc, Mount, MountKind};
use exocell_cell::images::walk::Directory;
use exocell_cell::settings::Tmpfs;
use serde_json::{Value, json};

use super::stage::{State, absolute};
use super::{Build, BuildError, Result};

/// Where scripts lie that a `RUN` brings along: in the memory of /dev.
pub const SCRIPTS: &str = "/dev/exocell-build";
/// How often it is looked whether a cache is free.
const LOCK_LOOK: Duration = Duration::from_millis(50);
/// Where secrets lie that name no place.
const SECRETS: &str = "/run/secrets";

/// All mounts of one `RUN`.
#[derive(Debug, Default)]
pub struct Mounts {
    /// Rows of the capability table.
    pub folders: Vec<Value>,
    pub memory: Vec<Tmpfs>,
    /// Which files are copies, and whose.
    pub copies: BTreeMap<PathBuf, FileCopy>,
    /// What the result depends on.
    pub key: Vec<String>,
    /// Caches that nobody else may use meanwhile.
    locks: Vec<File>,
}

impl Mounts {
    /// Where something is mounted, and the directory that is made for secrets.
    pub fn targets(&self) -> Vec<String> {
        let folders = self.folders.iter().filter_map(|row| row["guest"].as_str());
        let memory = self.memory.iter().map(|mount| mount.target.as_str());
        folders.chain(memory).chain([SECRETS]).map(str::to_owned).collect()
    }
}

fn folder(host: &Path, guest: &str, writable: bool) -> Value {
    let rights: &[&str] = if writable { &["read", "write", "exec"] } else { &["read", "exec"] };
    json!({ "host": host, "guest": guest, "rights": rights })
}

impl Build<'_> {
    /// What the options of a `RUN` ask for, without anything that must be made first.
    pub(super) fn mounts(
        &mut self,
        file: &Dockerfile,
        at: usize,
        state: &State,
        wanted: &[Mount],
    ) -> Result<(Mounts, Vec<Bind>)> {
        let (mut mounts, mut binds) = (Mounts::default(), Vec::new());
        for Mount { kind, options } in wanted {
            let options: BTreeMap<String, String> = options
                .iter()
                .map(|(name, text)| Ok((name.clone(), self.expand(state, text)?)))
                .collect::<Result<_>>()?;
            let get = |name: &str| options.get(name).map(String::as_str);
            let target = get("target").map(|path| absolute(&state.document, path));
            let target = target.map(|path| path.trim_end_matches('/').to_owned());
            if target.as_ref().is_some_and(String::is_empty) {
                return Err(BuildError::Refused("RUN --mount: the target is the root".to_owned()));
            }
            let writable = !matches!(get("readonly"), Some("true" | "1" | ""));
            let target = target.unwrap_or_default();
            mounts.key.push(format!("{kind:?} {options:?}"));
            match kind {
                MountKind::Tmpfs => {
                    let size = get("size").map(|size| format!("size={size}"));
                    mounts.memory.push(Tmpfs { target, options: size.into_iter().collect() });
                }
                MountKind::Cache => {
                    for odd in ["uid", "gid", "mode"] {
                        if get(odd).is_some() {
                            return Err(BuildError::Refused(format!(
                                "RUN --mount=type=cache,{odd}=: a cache is root's; leave {odd} out"
                            )));
                        }
                    }
                    let id = get("id").unwrap_or(&target);
                    let path = self.keep.cache_folder(id)?;
                    let sharing = get("sharing").unwrap_or("shared");
                    if !["shared", "private", "locked"].contains(&sharing) {
                        let why = format!(
                            "RUN --mount=type=cache,sharing={sharing}: shared, \
                                           private or locked"
                        );
                        return Err(BuildError::Refused(why));
                    }
                    if mounts.folders.iter().any(|row| row["host"] == json!(path)) {
                        return Err(BuildError::Refused(format!(
                            "RUN --mount=type=cache,id={id}: the same cache is mounted twice"
                        )));
                    }
                    mounts.locks.push(self.lock_cache(&path, sharing == "shared")?);
                    mounts.folders.push(folder(&path, &target, writable));
                }
                MountKind::Secret => self.secret(&mut mounts, &options, target)?,
                MountKind::Bind => {
                    let selection = Selection {
                        sources: vec![get("source").unwrap_or(".").to_owned()],
                        hidden: match get("from") {
                            Some(_) => Vec::new(),
                            None => self.options.hidden.clone(),
                        },
                        ..Selection::default()
                    };
                    let source = match get("from") {
                        Some(from) => self.source(file, at, from)?,
                        None => self.context()?,
                    };
                    let content = compose::hash(&selection, Some(&source))?;
                    mounts.key.push(content.to_string());
                    let path = selection.sources.into_iter().next().unwrap_or_default();
                    // What is written there is gone afterwards, as docker has it.
                    let writable = get("readonly") == Some("false");
                    binds.push(Bind { source, path, target, writable });
                }
            }
        }
        Ok((mounts, binds))
    }

    /// Holds a cache: alone, or with others who share it.
    fn lock_cache(&self, path: &Path, shares: bool) -> Result<File> {
        let failed = |error| CellError::host(format!("cannot lock {}", path.display()))(error);
        let file = File::open(path).map_err(failed)?;
        loop {
            let locked = if shares { file.try_lock_shared() } else { file.try_lock() };
            match locked {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(error)) => return Err(failed(error).into()),
                // Whoever builds may give up meanwhile.
                Err(TryLockError::WouldBlock) => self.stopper.check()?,
            }
            std::thread::sleep(LOCK_LOOK);
        }
    }

    fn secret(
        &mut self,
        mounts: &mut Mounts,
        options: &BTreeMap<String, String>,
        target: String,
    ) -> Result<()> {
        let get = |name: &str| options.get(name).map(String::as_str);
        if get("env").is_some() {
            return Err(BuildError::Refused(
                "RUN --mount=type=secret,env=: a secret is a file; leave env out".to_owned(),
            ));
        }
        let number = |name: &str, radix: u32, default: u32| match get(name) {
            None => Ok(default),
            Some(text) => u32::from_str_radix(text, radix).map_err(|_| {
                BuildError::Refused(format!(
                    "RUN --mount=type=secret,{name}={text}: give a number, a mode in octal"
                ))
            }),
        };
        // As docker has it.
        let copied = FileCopy {
            mode: number("mode", 8, 0o400)?,
            uid: number("uid", 10, 0)?,
            gid: number("gid", 10, 0)?,
        };
        let of_target = Path::new(&target).file_name().and_then(|name| name.to_str());
        let Some(id) = get("id").or(of_target) else {
            return Err(BuildError::Refused("RUN --mount=type=secret wants an id".to_owned()));
        };
        let target = if target.is_empty() { format!("{SECRETS}/{id}") } else { target.clone() };
        match self.secret_file(id)? {
            Some(path) => {
                mounts.copies.insert(PathBuf::from(&target), copied);
                mounts.folders.push(json!({
                    "host": path, "guest": target, "rights": ["read"],
                }));
                Ok(())
            }
            None if matches!(get("required"), Some("true" | "1" | "")) => {
                Err(BuildError::Refused(format!(
                    "RUN --mount=type=secret: no secret {id} was given (--secret id={id},src=FILE)"
                )))
            }
            None => Ok(()),
        }
    }

    /// The file on the host that the secret `id` is. One that the client keeps is written to a file
    /// that goes with the build.
    fn secret_file(&mut self, id: &str) -> Result<Option<PathBuf>> {
        if let Some(known) = self.options.secrets.iter().find(|secret| secret.id == id) {
            return Ok(Some(known.path.clone()));
        }
        let Some(content) = self.client.secret(id)? else { return Ok(None) };
        let failed = || CellError::host("cannot keep a secret for the build");
        let file = tempfile::Builder::new().prefix("secret-").tempfile_in(self.keep.work());
        let (mut file, path) = file.and_then(|file| Ok(file.keep()?)).map_err(failed())?;
        file.write_all(&content).map_err(failed())?;
        Ok(Some(path))
    }

    /// Lays out what is made for a `RUN` alone.
    pub(super) fn lay_out(&self, mounts: &mut Mounts, binds: Vec<Bind>) -> Result<()> {
        for bind in binds {
            let place = tempfile::Builder::new().prefix("bind-").tempdir_in(self.keep.work());
            let place = place.map_err(CellError::host("cannot make a folder"))?.keep();
            let directory = Directory::real(&place)
                .map_err(CellError::host(format!("cannot open {}", place.display())))?;
            let packed = archive::extract(&directory, |to| {
                compose::pack(&bind.source, &bind.path, &to).map_err(std::io::Error::from)
            });
            packed.map_err(|error| BuildError::Refused(format!("RUN --mount: {error}")))?;
            let host = only_file(&place, &bind.path).unwrap_or(place);
            mounts.folders.push(folder(&host, &bind.target, bind.writable));
        }
        Ok(())
    }

    /// Shows a `RUN` the documents that it executes.
    pub(super) fn scripts(&self, mounts: &mut Mounts, documents: &[&Heredoc]) -> Result<()> {
        use std::os::unix::fs::PermissionsExt;
        let place = tempfile::Builder::new().prefix("script-").tempdir_in(self.keep.work());
        let place = place.map_err(CellError::host("cannot make a folder"))?.keep();
        for (at, document) in documents.iter().enumerate() {
            let path = place.join(at.to_string());
            fs::write(&path, &document.content)
                .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
                .map_err(CellError::host(format!("cannot write {}", path.display())))?;
        }
        mounts.folders.push(folder(&place, SCRIPTS, false));
        Ok(())
    }
}

/// Files of a tree that a `RUN` is shown.
pub struct Bind {
    source: std::sync::Arc<exocell_cell::images::Rootfs>,
    path: String,
    target: String,
    writable: bool,
}

/// The file itself, where what was asked for is one.
fn only_file(place: &Path, path: &str) -> Option<PathBuf> {
    let name = Path::new(path).file_name()?;
    let host = place.join(name);
    let is_alone = fs::read_dir(place).ok()?.count() == 1;
    (is_alone && fs::symlink_metadata(&host).is_ok_and(|found| found.is_file())).then_some(host)
}
