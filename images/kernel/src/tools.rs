//! The programs that a kernel build runs.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::error::KernelError;
use crate::recipe::Arch;

/// Program and the Debian package that has it.
const NEEDED: &[(&str, &str)] = &[
    ("bc", "bc"),
    ("bison", "bison"),
    ("flex", "flex"),
    ("gcc", "gcc"),
    ("git", "git"),
    ("ld", "binutils"),
    ("make", "make"),
    ("objdump", "binutils"),
    ("perl", "perl"),
    ("strip", "binutils"),
    ("tar", "tar"),
    ("xz", "xz-utils"),
];

/// Headers that the build's own programs for x86-64 want, below the system's: objtool reads ELF
/// files (tools/objtool/Makefile).
const HEADERS_X86: &[(&str, &str)] = &[("gelf.h", "libelf-dev")];

/// Variables of a calling `make`, compiler wrapper or git hook that would change what we build.
const FOREIGN: &[&str] = &[
    "ARCH",
    "CFLAGS",
    "CROSS_COMPILE",
    "GIT_DIR",
    "GIT_INDEX_FILE",
    "GIT_WORK_TREE",
    "KCFLAGS",
    "LDFLAGS",
    "MAKEFLAGS",
    "MAKELEVEL",
    "MAKEOVERRIDES",
    "MFLAGS",
    "SUBARCH",
];

/// Checks that every program is in `path`, a list as in `$PATH`, and every header in `headers`.
pub fn check(arch: Arch, path: &OsStr, headers: &Path) -> Result<(), KernelError> {
    let more = match arch {
        Arch::Um => &[],
        Arch::X86 => HEADERS_X86,
    };
    let missing = || {
        let headers = more.iter().filter(|(header, _)| !headers.join(header).is_file());
        NEEDED.iter().filter(|(tool, _)| !is_in(path, tool)).chain(headers)
    };
    let tools: Vec<_> = missing().map(|(tool, _)| *tool).collect();
    let mut packages: Vec<_> = missing().map(|(_, package)| *package).collect();
    packages.sort_unstable();
    packages.dedup();
    if tools.is_empty() { Ok(()) } else { Err(KernelError::MissingTools { tools, packages }) }
}

/// A command with a predictable environment: messages in English, no flags of a calling make.
pub fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    command.env("LC_ALL", "C");
    for variable in FOREIGN {
        command.env_remove(variable);
    }
    command
}

/// The first line of `gcc --version`, for the manifest.
pub fn compiler() -> String {
    let output = command("gcc").arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    text.unwrap_or_default().lines().next().unwrap_or("unknown").to_owned()
}

fn is_in(path: &OsStr, tool: &str) -> bool {
    std::env::split_paths(path).any(|folder| is_executable(&folder.join(tool)))
}

fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn folder_with(tools: impl Iterator<Item = &'static str>) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("temporary folder");
        for tool in tools {
            let file = folder.path().join(tool);
            fs::write(&file, "").expect("write");
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("chmod");
        }
        folder
    }

    #[test]
    fn all_missing_tools_and_their_packages_are_named_once() {
        let present = NEEDED
            .iter()
            .map(|(tool, _)| *tool)
            .filter(|tool| !["flex", "strip", "ld"].contains(tool));
        let folder = folder_with(present);
        let error = check(Arch::Um, folder.path().as_os_str(), folder.path())
            .expect_err("three are missing")
            .to_string();
        assert!(error.contains("flex, ld, strip"), "{error}");
        assert!(error.contains("apt-get install binutils flex"), "{error}");
    }

    #[test]
    fn a_file_that_is_not_executable_is_no_tool() {
        let folder = folder_with(NEEDED.iter().map(|(tool, _)| *tool));
        let check = |arch| check(arch, folder.path().as_os_str(), folder.path());
        check(Arch::Um).expect("all there");
        let error = check(Arch::X86).expect_err("a header is missing").to_string();
        assert!(error.contains("gelf.h") && error.contains("libelf-dev"), "{error}");
        fs::set_permissions(folder.path().join("bc"), fs::Permissions::from_mode(0o644))
            .expect("chmod");
        assert!(matches!(check(Arch::Um), Err(KernelError::MissingTools { .. })));
    }
}
