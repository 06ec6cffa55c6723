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

use std::path::{Path, PathBuf};

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
