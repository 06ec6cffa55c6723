//! The guest kernel: its source, its build, and the cache of finished kernels.
//!
//! There is one for each platform: of ARCH=um for `para`, and of x86-64 for `kvm`, by recipes that
//! share source, features and cache ([`Recipe::embedded`], [`Recipe::kvm`]).
//!
//! The main path is [`build`]: the [`Recipe`] (what `guest-kernel-patches/` says) -> a checked
//! source tarball (`source`) -> a patched, configured and compiled tree (`steps`) -> one directory
//! of the cache (`store`), named by the recipe's hash:
//!
//! ```text
//! <root>/kernels/<hash>/{linux,config,build.log,manifest.json}
//! <root>/kernels/.build-*      a build under way, or what a kill left; the next build removes it
//! <root>/kernels/failed.log    the log of the last build that failed
//! <root>/kernels/lock          held by the one builder; others wait for it
//! ```
//!
//! A package installs its kernel beside the executable, as `kernels/<hash>`. It is used where the
//! cache has none.
#![forbid(unsafe_code)]

mod config;
mod error;
mod layout;
mod pin;
mod progress;
mod recipe;
mod runner;
mod source;
mod steps;
mod store;
mod tools;

use std::path::{Path, PathBuf};

pub use error::{Attempt, KernelError, Lost};
pub use progress::{Progress, Step};
pub use recipe::{Arch, Recipe};
pub use source::Origin;
pub use store::{Kernel, Manifest, Status};

/// The environment variable that names a source tarball to use instead of fetching one.
pub const TARBALL_VARIABLE: &str = "EXOCELL_KERNEL_TARBALL";

/// What a build may be told.
#[derive(Debug, Clone)]
pub struct BuildOptions {
    /// The kernel to build; the embedded one unless a test says otherwise.
    pub recipe: Recipe,
    /// A source tarball; without one the source is fetched.
    pub tarball: Option<PathBuf>,
    /// How many compilers run at once.
    pub jobs: usize,
}

impl BuildOptions {
    /// The embedded recipe, the tarball of [`TARBALL_VARIABLE`], one compiler a CPU.
    pub fn from_env() -> Self {
        let tarball = std::env::var_os(TARBALL_VARIABLE).filter(|value| !value.is_empty());
        Self {
            recipe: Recipe::embedded(),
            tarball: tarball.map(PathBuf::from),
            jobs: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// Whether the embedded recipe's kernel is in the cache below `root`, or was installed beside this
/// executable.
///
/// # Errors
/// The cache exists and cannot be read.
pub fn status(root: &Path) -> Result<Status, KernelError> {
    status_of(&Recipe::embedded(), root)
}

/// Whether `recipe`'s kernel is in the cache below `root`, or was installed beside this executable.
///
/// # Errors
/// The cache exists and cannot be read.
pub fn status_of(recipe: &Recipe, root: &Path) -> Result<Status, KernelError> {
    store::Store::new(root).status(&recipe.hash())
}

/// The recipe's kernel: from the cache below `root`, or built into it.
///
/// Two builders do not race: the second waits and takes the first one's kernel.
/// `progress` is called at the start of each step and as compilation advances.
///
/// # Errors
/// A missing tool, no usable source, a step that failed (with its last lines of output), a config
/// symbol that did not survive, or an input/output error of the cache.
pub fn build(
    root: &Path,
    options: &BuildOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Kernel, KernelError> {
    let store = store::Store::new(root);
    let hash = options.recipe.hash();
    if let Status::Present(kernel) = store.status(&hash)? {
        return Ok(kernel);
    }
    let headers = Path::new("/usr/include");
    tools::check(options.recipe.arch(), &std::env::var_os("PATH").unwrap_or_default(), headers)?;
    let _lock = store.lock(progress)?;
    match store.status(&hash)? {
        Status::Present(kernel) => Ok(kernel),
        Status::Absent { .. } => steps::build(&store, options, progress),
    }
}
