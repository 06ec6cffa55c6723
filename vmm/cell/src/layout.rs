//! Where everything lives below the state root.
//!
//! ```text
//! ROOT/images    the image store            ROOT/cells/ID/spec.json    what was asked for
//! ROOT/kernels   built guest kernels                      status.json  where it stands
//! ROOT/disks     empty overlay disks                      lock         held while it lives
//! ROOT/modules   Wasm modules that are served             control.sock its supervisor
//! ROOT/networks  whom served modules talked to              log, console.log, network.log
//! ROOT/switches  networks between cells, see `networks`
//! ROOT/compiled  what large modules were compiled to
//! ROOT/budget    memory of all cells
//! ROOT/events.jsonl  what became of cells, see `events`
//! ROOT/commands  the command, for guests that start isolates
//! ROOT/builds    layers of builds, see `build` of `exocell-docker`
//! ROOT/copies    where copies out of cells are unpacked, while they are
//! ```

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use exocell_images::private;

use crate::CellError;

/// The state root.
#[derive(Debug, Clone)]
pub struct Layout {
    root: PathBuf,
}

impl Layout {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// `/var/lib/exocell` for root, `$XDG_DATA_HOME/exocell` (or
    /// `~/.local/share/exocell`) for anyone else.
    pub fn default_root() -> PathBuf {
        if nix::unistd::geteuid().is_root() {
            return PathBuf::from("/var/lib/exocell");
        }
        let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".local/share"));
        std::env::var_os("XDG_DATA_HOME")
            .map(PathBuf::from)
            .or_else(home)
            .unwrap_or_else(|| PathBuf::from("/var/tmp"))
            .join("exocell")
    }

    /// Whoever has made the root, or what is in it, decides what is found there. One that others
    /// may write is closed. One that is not there yet is made later.
    ///
    /// # Errors
    /// It is another user's, or held something of another user's when it was open; the host's.
    pub fn check_owner(&self) -> Result<(), CellError> {
        let Ok(found) = fs::metadata(&self.root) else { return Ok(()) };
        let own = nix::unistd::geteuid().as_raw();
        let refuse = |path: &Path, uid: u32| {
            Err(CellError::Usage(format!(
                "{} is of the user {uid}, and you are {own}; name a state root of your own \
                 (--root, EXOCELL_ROOT)",
                path.display()
            )))
        };
        if found.uid() != own {
            return refuse(&self.root, found.uid());
        }
        if found.mode() & 0o022 == 0 {
            return Ok(());
        }
        let failed = || CellError::host(format!("cannot close {}", self.root.display()));
        private::folder(&self.root).map_err(failed())?;
        for entry in fs::read_dir(&self.root).map_err(failed())? {
            let entry = entry.map_err(failed())?;
            let uid = entry.metadata().map_err(failed())?.uid();
            if uid != own {
                // It is looked at again.
                let open = Permissions::from_mode(found.mode() & 0o7777);
                fs::set_permissions(&self.root, open).map_err(failed())?;
                return refuse(&entry.path(), uid);
            }
        }
        Ok(())
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    pub fn kernels(&self) -> PathBuf {
        self.root.to_owned()
    }

    pub fn disks(&self) -> PathBuf {
        self.root.join("disks")
    }

    /// Containers of the server for Docker's clients, each a file.
    pub fn containers(&self) -> PathBuf {
        self.root.join("docker/containers")
    }

    /// Modules that are served, and whose they are.
    pub fn modules(&self) -> PathBuf {
        self.root.join("modules")
    }

    /// What large modules were compiled to, sealed.
    pub fn compiled(&self) -> PathBuf {
        self.root.join("compiled")
    }

    /// Volumes: a directory each, with the name of the volume.
    pub fn volumes(&self) -> PathBuf {
        self.root.join("docker").join("volumes")
    }

    /// What all cells may have of the memory together; there is none by default.
    pub fn budget(&self) -> PathBuf {
        self.root.join("budget")
    }

    pub fn networks(&self) -> PathBuf {
        self.root.join("networks")
    }

    /// Networks between cells: a directory each.
    pub fn switches(&self) -> PathBuf {
        self.root.join("switches")
    }

    /// Notes of folders anywhere that `cp` uses.
    pub fn copies(&self) -> PathBuf {
        self.root.join("copies")
    }

    /// What builds keep for the next.
    pub fn builds(&self) -> PathBuf {
        self.root.join("builds")
    }

    pub fn cells(&self) -> PathBuf {
        self.root.join("cells")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::chown;

    use super::*;

    #[test]
    fn a_root_that_others_made_is_refused_and_one_that_they_may_write_closed() {
        let place = tempfile::tempdir().unwrap();
        let layout = Layout::new(place.path());
        layout.check_owner().unwrap();
        Layout::new(place.path().join("none")).check_owner().unwrap();
        let set = |mode| fs::set_permissions(place.path(), Permissions::from_mode(mode)).unwrap();
        let mode = || fs::metadata(place.path()).unwrap().mode() & 0o7777;
        set(0o755);
        layout.check_owner().unwrap();
        assert_eq!(mode(), 0o755);
        set(0o1777);
        layout.check_owner().unwrap();
        assert_eq!(mode() & 0o077, 0);
        if nix::unistd::geteuid().is_root() {
            let refused = || {
                let told = layout.check_owner().unwrap_err().to_string();
                assert!(told.contains("of the user 1000") && told.contains("--root"), "{told}");
            };
            fs::write(place.path().join("budget"), "").unwrap();
            chown(place.path().join("budget"), Some(1000), None).unwrap();
            set(0o777);
            refused();
            refused();
            chown(place.path(), Some(1000), None).unwrap();
            refused();
        }
    }
}
