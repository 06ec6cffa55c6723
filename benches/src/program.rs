//! The programs that subjects run: compiled once, kept by the hash of their
//! sources, so that every subject runs the very same file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::BenchError;
use crate::scratch::Scratch;

/// A program and its sources, as (file name, content).
pub struct Program {
    pub name: &'static str,
    pub compiler: Compiler,
    pub sources: &'static [(&'static str, &'static str)],
}

/// What makes a program of its sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compiler {
    /// All `.c` files, linked statically.
    Gcc,
    /// A Go module, whose dependencies come from the module proxy.
    Go,
}

impl Compiler {
    fn name(self) -> &'static str {
        match self {
            Self::Gcc => "gcc",
            Self::Go => "go",
        }
    }

    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Gcc => &["-static", "-O2", "-Wall", "-Wextra", "-pthread"],
            Self::Go => &["build", "-trimpath", "-buildvcs=false"],
        }
    }
}

impl Program {
    /// The folder below `cache` that holds the compiled program.
    pub fn prepare(&self, cache: &Path) -> Result<PathBuf, BenchError> {
        let folder = cache.join(format!("{}-{}", self.name, self.hash()));
        if !folder.join(self.name).exists() {
            let work = Scratch::new(cache)?;
            self.compile(work.path())?;
            publish(work.path(), &folder)?;
        }
        Ok(folder)
    }

    fn hash(&self) -> String {
        let mut hasher = Sha256::new();
        self.compiler.flags().iter().for_each(|flag| hasher.update(flag));
        for (name, text) in self.sources {
            hasher.update(name);
            hasher.update(text.len().to_le_bytes());
            hasher.update(text);
        }
        hasher.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    fn compile(&self, folder: &Path) -> Result<(), BenchError> {
        for (name, text) in self.sources {
            let file = folder.join(name);
            fs::write(&file, text).map_err(BenchError::host(file.display()))?;
        }
        let files = self.sources.iter().map(|(name, _)| *name).filter(|name| name.ends_with(".c"));
        let compiler = self.compiler.name();
        let failed = |why: String| BenchError::Compile { program: self.name, compiler, why };
        let output = Command::new(compiler)
            .current_dir(folder)
            .args(self.compiler.flags())
            .args(["-o", self.name])
            .args(files)
            .output()
            .map_err(|error| failed(error.to_string()))?;
        match output.status.success() {
            true => Ok(()),
            false => Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
        }
    }
}

/// Moves a finished folder to its place; another run may have been first. Cells
/// read the folder as another user.
fn publish(work: &Path, folder: &Path) -> Result<(), BenchError> {
    let readable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(work, readable).map_err(BenchError::host(work.display()))?;
    match fs::rename(work, folder) {
        Err(error) if !folder.exists() => Err(BenchError::host(folder.display())(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn program(
        name: &'static str,
        sources: &'static [(&'static str, &'static str)],
    ) -> Program {
        Program { name, compiler: Compiler::Gcc, sources }
    }

    const GOOD: Program = program("good", &[("a.h", "#define X 7\n"), ("a.c", MAIN)]);
    const MAIN: &str = "#include \"a.h\"\nint main(void) { return X; }\n";

    #[test]
    fn a_program_is_compiled_once_and_runs() {
        let cache = tempfile::tempdir().unwrap();
        let folder = GOOD.prepare(cache.path()).unwrap();
        let built = fs::metadata(folder.join("good")).unwrap().modified().unwrap();
        let status = Command::new(folder.join("good")).status().unwrap();
        assert_eq!(status.code(), Some(7));
        assert_eq!(GOOD.prepare(cache.path()).unwrap(), folder);
        assert_eq!(fs::metadata(folder.join("good")).unwrap().modified().unwrap(), built);
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 1);
    }

    #[test]
    fn another_source_is_another_program_and_a_wrong_one_says_why() {
        let cache = tempfile::tempdir().unwrap();
        let bad = program("good", &[("a.c", "int main(void) { return; }\n")]);
        assert_ne!(bad.hash(), GOOD.hash());
        let wrong = program("wrong", &[("a.c", "not C\n")]);
        let error = wrong.prepare(cache.path()).unwrap_err().to_string();
        assert!(error.contains("a.c:1"), "{error}");
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0);
    }
}
