//! The steps from a tarball to a kernel in the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::KernelError;
use crate::progress::{Progress, Step};
use crate::recipe::{Arch, Recipe, touched_paths};
use crate::runner::Runner;
use crate::source::{self, Origin};
use crate::store::{Kernel, Manifest, Store};
use crate::{BuildOptions, layout, tools};

/// Code of machines and devices that a guest kernel never has: left in the tarball, which halves the
/// tree. Makefiles and Kconfig files are unpacked, so configuration sees the whole kernel.
const NOT_UNPACKED: &[&str] = &[
    "*/Documentation/*.rst",
    "*/arch/*/boot/dts/*",
    "*/drivers/gpu/*.[chS]",
    "*/drivers/infiniband/*.[ch]",
    "*/drivers/media/*.[ch]",
    "*/drivers/net/ethernet/*.[ch]",
    "*/drivers/net/wireless/*.[ch]",
    "*/sound/*.[chS]",
];

/// The build's date in `uname -v`: fixed, so that equal sources give equal kernels.
const TIMESTAMP: &str = "Thu Jan  1 00:00:00 UTC 1970";

/// How many layouts are tried, the compiler's own first.
const LAYOUTS: usize = 8;
/// Parts of the kernel that get something between them and the next, in another layout. None is so
/// large that a distance within it could be taken for what is looked for.
const PADDED: &[&str] = &[
    "init",
    "arch/um/kernel",
    "kernel",
    "mm",
    "fs",
    "security",
    "crypto",
    "block",
    "lib",
    "drivers",
    "net",
];
const FUNCTION_ALIGNMENT: usize = 16;

/// Builds a recipe's kernel and installs it. The caller holds the store's lock.
pub fn build(
    store: &Store,
    options: &BuildOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Kernel, KernelError> {
    let failed_log = store.failed_log();
    let _ = fs::remove_file(&failed_log); // of an earlier build; there may be none
    let work = store.work_folder()?;
    let mut runner = Runner::new(failed_log, progress)?;
    let built = Build { work: work.path(), options, runner: &mut runner }.run();
    // The tree of more than a gigabyte goes either way; the log is what a failure leaves.
    let kernel = built.and_then(|manifest| install(store, work.path(), &manifest, &mut runner));
    work.close().map_err(KernelError::io("remove the build tree in", runner.log_path()))?;
    kernel
}

/// The log becomes part of the kernel's directory.
fn install(
    store: &Store,
    work: &Path,
    manifest: &Manifest,
    runner: &mut Runner<'_>,
) -> Result<Kernel, KernelError> {
    let log = work.join("stage/build.log");
    fs::rename(runner.log_path(), &log).map_err(KernelError::io("write", &log))?;
    store.install(&work.join("stage"), manifest)
}

struct Build<'b, 'r> {
    work: &'b Path,
    options: &'b BuildOptions,
    runner: &'b mut Runner<'r>,
}

impl Build<'_, '_> {
    fn run(mut self) -> Result<Manifest, KernelError> {
        let recipe = &self.options.recipe;
        let named = self.options.tarball.as_deref();
        let source = source::fetch(&recipe.pin()?, named, self.work, self.runner)?;
        self.unpack(&source.tarball)?;
        self.patch(recipe)?;
        self.configure(recipe)?;
        self.compile()?;
        self.stage(recipe, source.origin)
    }

    fn tree(&self) -> PathBuf {
        self.work.join("tree")
    }

    fn unpack(&mut self, tarball: &Path) -> Result<(), KernelError> {
        self.runner.start(Step::Unpack);
        let tree = self.tree();
        fs::create_dir(&tree).map_err(KernelError::io("create", &tree))?;
        let mut tar = tools::command("tar");
        tar.args(["--strip-components=1", "--no-same-owner", "--wildcards"]);
        tar.args(NOT_UNPACKED.iter().map(|pattern| format!("--exclude={pattern}")));
        tar.arg("-C").arg(&tree).arg("-xf").arg(tarball);
        self.runner.run(Step::Unpack, &mut tar)
    }

    /// Applies the series in a repository of only the files it touches: `git am` refuses fuzz.
    fn patch(&mut self, recipe: &Recipe) -> Result<(), KernelError> {
        self.runner.start(Step::Patch);
        let patches = recipe.patches()?;
        let tree = self.tree();
        let touched = patches.iter().flat_map(|(_, text)| touched_paths(text));
        let mut touched: Vec<&str> = touched.filter(|path| tree.join(path).is_file()).collect();
        touched.sort_unstable();
        touched.dedup();
        self.git(&["init", "--quiet"])?;
        if !touched.is_empty() {
            self.git(&[&["add", "--force", "--"], touched.as_slice()].concat())?;
        }
        self.git(&["commit", "--quiet", "--allow-empty", "--message=base"])?;
        for (name, text) in patches {
            self.apply(name, text)?;
        }
        let repository = tree.join(".git");
        fs::remove_dir_all(&repository).map_err(KernelError::io("remove", &repository))
    }

    fn apply(&mut self, name: &str, text: &str) -> Result<(), KernelError> {
        let file = self.work.join(name);
        fs::write(&file, text).map_err(KernelError::io("write", &file))?;
        self.git(&["am", "--keep-cr", &file.to_string_lossy()])
    }

    fn git(&mut self, arguments: &[&str]) -> Result<(), KernelError> {
        let mut git = tools::command("git");
        git.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_NOSYSTEM", "1");
        git.args(["-c", "user.name=exocell", "-c", "user.email=exocell@example.invalid"]);
        git.current_dir(self.tree()).args(arguments);
        self.runner.run(Step::Patch, &mut git)
    }

    fn configure(&mut self, recipe: &Recipe) -> Result<(), KernelError> {
        self.runner.start(Step::Configure);
        let wanted = recipe.wanted_config()?;
        let fragments = self.work.join("fragments.config");
        fs::write(&fragments, recipe.merged_config())
            .map_err(KernelError::io("write", &fragments))?;
        let mut make = self.make("allnoconfig");
        self.runner.run(Step::Configure, make.env("KCONFIG_ALLCONFIG", &fragments))?;
        let dot_config = self.tree().join(".config");
        let text = fs::read_to_string(&dot_config).map_err(KernelError::io("read", &dot_config))?;
        wanted.check(&text)
    }

    /// Compiles and links, in another layout each time that the kernel could not boot with keys.
    fn compile(&mut self) -> Result<(), KernelError> {
        self.runner.start(Step::Compile);
        self.link()?;
        if self.options.recipe.arch() != Arch::Um {
            return Ok(());
        }
        let mut strays = self.strays()?;
        for attempt in 1..LAYOUTS {
            if strays.is_empty() {
                return Ok(());
            }
            self.runner.note(&format!(
                "layout {attempt} of {LAYOUTS}: could change keys at {}",
                strays.join(", ")
            ))?;
            self.pad(attempt)?;
            self.link()?;
            strays = self.strays()?;
        }
        match strays.is_empty() {
            true => Ok(()),
            false => Err(KernelError::Layout { tries: LAYOUTS, at: strays }),
        }
    }

    /// Changes the distances between the kernel's parts.
    fn pad(&mut self, attempt: usize) -> Result<(), KernelError> {
        let tree = self.tree();
        for (part, share) in PADDED.iter().zip(1..) {
            let makefile = tree.join(part).join("Makefile");
            if !makefile.is_file() {
                continue;
            }
            if attempt == 1 {
                let text =
                    fs::read_to_string(&makefile).map_err(KernelError::io("read", &makefile))?;
                fs::write(&makefile, text + "\nobj-y += exocell_pad.o\n")
                    .map_err(KernelError::io("write", &makefile))?;
            }
            let pad = tree.join(part).join("exocell_pad.S");
            let bytes = FUNCTION_ALIGNMENT * (attempt * share);
            let text = format!(
                ".text\n.balign {FUNCTION_ALIGNMENT}\n.skip {bytes}, 0xcc\n\
                 .section .note.GNU-stack, \"\", @progbits\n"
            );
            fs::write(&pad, text).map_err(KernelError::io("write", &pad))?;
        }
        Ok(())
    }

    /// Where the kernel would panic at a boot with keys.
    fn strays(&mut self) -> Result<Vec<String>, KernelError> {
        let linux = self.kernel();
        let elf = fs::read(&linux).map_err(KernelError::io("read", &linux))?;
        let mut strays = Vec::new();
        for change in layout::changes(&elf) {
            let mut objdump = tools::command("objdump");
            objdump.args(["--disassemble", "--disassemble-zeroes", "--no-show-raw-insn"]);
            // From where an instruction begins, so that it is read as the compiler meant it.
            objdump.arg(format!("--start-address={:#x}", change.start));
            objdump.arg(format!("--stop-address={:#x}", change.address + 16));
            let listing = self.runner.output(Step::Compile, objdump.arg(&linux))?;
            if !layout::is_instruction(&elf, change.address, &layout::starts(&listing)) {
                strays.push(change.to_string());
            }
        }
        Ok(strays)
    }

    fn link(&mut self) -> Result<(), KernelError> {
        let mut make = self.make(self.options.recipe.arch().target());
        make.arg(format!("-j{}", self.options.jobs.max(1)));
        make.env("KBUILD_BUILD_TIMESTAMP", TIMESTAMP);
        make.env("KBUILD_BUILD_USER", "exocell").env("KBUILD_BUILD_HOST", "exocell");
        self.runner.run(Step::Compile, &mut make)
    }

    fn make(&self, target: &str) -> Command {
        let mut make = tools::command("make");
        let arch = format!("ARCH={}", self.options.recipe.arch().name());
        make.current_dir(self.tree()).args([&arch, "LOCALVERSION=", target]);
        make
    }

    /// Where the linker puts it.
    fn kernel(&self) -> PathBuf {
        self.tree().join(self.options.recipe.arch().target())
    }

    /// Lays out the directory that goes into the cache.
    fn stage(&mut self, recipe: &Recipe, origin: Origin) -> Result<Manifest, KernelError> {
        self.runner.start(Step::Install);
        let (tree, stage) = (self.tree(), self.work.join("stage"));
        fs::create_dir(&stage).map_err(KernelError::io("create", &stage))?;
        let linux = stage.join("linux");
        let mut strip = tools::command("strip");
        self.runner.run(Step::Install, strip.arg("-o").arg(&linux).arg(self.kernel()))?;
        let config = stage.join("config");
        fs::copy(tree.join(".config"), &config).map_err(KernelError::io("write", &config))?;
        let release = tree.join("include/config/kernel.release");
        let version = fs::read_to_string(&release).map_err(KernelError::io("read", &release))?;
        let size_bytes = fs::metadata(&linux).map_err(KernelError::io("read", &linux))?.len();
        let (hash, version) = (recipe.hash(), version.trim().to_owned());
        Ok(Manifest { hash, version, size_bytes, origin, compiler: tools::compiler() })
    }
}
