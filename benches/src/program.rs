//! The C programs that subjects run: compiled once, static, kept by the hash of
//! their sources, so that every subject runs the very same file.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::BenchError;

/// A program and its sources, as (file name, content).
pub struct Program {
    pub name: &'static str,
    pub sources: &'static [(&'static str, &'static str)],
}

const FLAGS: [&str; 5] = ["-static", "-O2", "-Wall", "-Wextra", "-pthread"];

impl Program {
    /// The folder below `cache` that holds the compiled program.
    pub fn prepare(&self, cache: &Path) -> Result<PathBuf, BenchError> {
        let folder = cache.join(format!("{}-{}", self.name, self.hash()));
        if !folder.join(self.name).exists() {
            fs::create_dir_all(cache).map_err(BenchError::host(cache.display()))?;
            let work = tempfile::tempdir_in(cache).map_err(BenchError::host(cache.display()))?;
            self.compile(work.path())?;
            publish(work.path(), &folder)?;
        }
        Ok(folder)
    }

    fn hash(&self) -> String {
        let mut hasher = Sha256::new();
        FLAGS.iter().for_each(|flag| hasher.update(flag));
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
        let failed = |why: String| BenchError::Compile { program: self.name, why };
        let output = Command::new("gcc")
            .current_dir(folder)
            .args(FLAGS)
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

    const GOOD: Program =
        Program { name: "good", sources: &[("a.h", "#define X 7\n"), ("a.c", MAIN)] };
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
        let bad = Program { name: "good", sources: &[("a.c", "int main(void) { return; }\n")] };
        assert_ne!(bad.hash(), GOOD.hash());
        let wrong = Program { name: "wrong", sources: &[("a.c", "not C\n")] };
        let error = wrong.prepare(cache.path()).unwrap_err().to_string();
        assert!(error.contains("a.c:1"), "{error}");
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0);
    }
}
