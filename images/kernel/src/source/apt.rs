//! The Debian package with the source, fetched by apt with state of its own.
//!
//! The mirror's address (and a proxy, if any) comes from the machine's apt configuration; sources,
//! lists, cache and status lie in a temporary directory, so that the machine's own are not touched.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Origin, Source, expect_hash, sha256_of};
use crate::error::KernelError;
use crate::pin::Debian;
use crate::progress::Step;
use crate::runner::Runner;
use crate::tools;

/// Where Debian's archive keys lie; the first is the newer name.
const KEYRINGS: &[&str] = &[
    "/usr/share/keyrings/debian-archive-keyring.pgp",
    "/usr/share/keyrings/debian-archive-keyring.gpg",
];

/// Suites that tell a Debian archive from other archives with a component `main`.
const DEBIAN_SUITES: &[&str] =
    &["bookworm", "trixie", "forky", "duke", "sid", "oldstable", "stable", "testing", "unstable"];

/// Asks apt for `URI SUITE COMPONENT` of its sources, those never updated from included.
const INDEX_TARGETS: &[&str] = &[
    "indextargets",
    "--no-release-info",
    "--format",
    "$(REPO_URI) $(RELEASE) $(COMPONENT)",
    "Created-By: Packages",
];

/// Downloads, checks and opens the package. Errors are texts for the list of what was tried.
pub fn fetch(debian: &Debian, work: &Path, runner: &mut Runner<'_>) -> Result<Source, String> {
    let keyring = KEYRINGS.iter().find(|path| Path::new(path).exists());
    let keyring =
        keyring.ok_or("no Debian archive keys; install: apt-get install debian-archive-keyring")?;
    let mirrors = mirrors()?;
    let mut why = Vec::new();
    for (index, mirror) in mirrors.iter().enumerate() {
        let root = work.join(format!("apt{index}"));
        match fetch_from(mirror, keyring, debian, &root, runner) {
            Ok(source) => return Ok(source),
            Err(error) => why.push(format!("mirror {mirror}: {error}")),
        }
    }
    Err(why.join("; "))
}

/// The Debian mirrors of the machine's apt configuration, of either file format.
fn mirrors() -> Result<Vec<String>, String> {
    let output = tools::command("apt-get").args(INDEX_TARGETS).output();
    let output = output.map_err(|error| format!("cannot run apt-get: {error}"))?;
    let mirrors = parse_mirrors(&String::from_utf8_lossy(&output.stdout));
    if mirrors.is_empty() {
        return Err(
            "this machine's apt sources name no Debian mirror with component main".to_owned()
        );
    }
    Ok(mirrors)
}

/// The distinct archive addresses of `URI SUITE COMPONENT` lines that are Debian's.
fn parse_mirrors(targets: &str) -> Vec<String> {
    let mut mirrors = Vec::new();
    for line in targets.lines() {
        let mut words = line.split_whitespace();
        let (Some(uri), Some(suite), Some("main")) = (words.next(), words.next(), words.next())
        else {
            continue;
        };
        let is_web = uri.starts_with("http://") || uri.starts_with("https://");
        if is_web && DEBIAN_SUITES.contains(&suite) && !mirrors.iter().any(|known| known == uri) {
            mirrors.push(uri.to_owned());
        }
    }
    mirrors
}

fn fetch_from(
    mirror: &str,
    keyring: &str,
    debian: &Debian,
    root: &Path,
    runner: &mut Runner<'_>,
) -> Result<Source, String> {
    let shown = |error: KernelError| error.to_string();
    write_root(root, &sources_list(mirror, keyring, &debian.suites)).map_err(shown)?;
    // A mirror may lack one of the suites; the download tells whether another one was enough.
    let update = runner.run(Step::Fetch, apt_get(root).arg("update"));
    let pinned = format!("{}={}", debian.package, debian.version);
    let is_pinned = runner.run(Step::Fetch, apt_get(root).args(["download", &pinned])).is_ok();
    if !is_pinned {
        let newest = runner.run(Step::Fetch, apt_get(root).args(["download", &debian.package]));
        update.and(newest).map_err(shown)?;
    }
    open(debian, root, is_pinned, runner).map_err(shown)
}

/// Checks the downloaded package and takes the tarball out of it.
fn open(
    debian: &Debian,
    root: &Path,
    is_pinned: bool,
    runner: &mut Runner<'_>,
) -> Result<Source, KernelError> {
    let (package, version) = downloaded(root, &debian.package)?;
    let sha256 = match is_pinned {
        true => expect_hash(&package, &debian.package, &debian.sha256)?,
        false => sha256_of(&package)?,
    };
    let content = root.join("content");
    runner.run(Step::Fetch, tools::command("dpkg-deb").arg("-x").arg(&package).arg(&content))?;
    fs::remove_file(&package).map_err(KernelError::io("remove", &package))?;
    let origin = Origin { name: debian.package.clone(), version, sha256, pinned: is_pinned };
    Ok(Source { tarball: content.join(&debian.tarball), origin })
}

/// The package file in `root` and its version: apt names it `NAME_VERSION_ARCH.deb`.
fn downloaded(root: &Path, name: &str) -> Result<(PathBuf, String), KernelError> {
    let failed = || KernelError::io("list", root);
    for entry in fs::read_dir(root).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        if let Some(version) = version_of(&entry.file_name().to_string_lossy(), name) {
            return Ok((entry.path(), version));
        }
    }
    let gone = std::io::Error::new(std::io::ErrorKind::NotFound, "apt-get left no package file");
    Err(KernelError::io("find the download in", root)(gone))
}

/// The version in a package's file name, where an epoch's colon is written `%3a`.
fn version_of(file: &str, package: &str) -> Option<String> {
    let rest = file.strip_prefix(package)?.strip_prefix('_')?.strip_suffix(".deb")?;
    let (version, _architecture) = rest.rsplit_once('_')?;
    Some(version.replace("%3a", ":"))
}

fn sources_list(mirror: &str, keyring: &str, suites: &[String]) -> String {
    suites
        .iter()
        .map(|suite| format!("deb [signed-by={keyring}] {mirror} {suite} main\n"))
        .collect()
}

fn write_root(root: &Path, sources: &str) -> Result<(), KernelError> {
    for folder in ["state/lists/partial", "cache/archives/partial"] {
        let folder = root.join(folder);
        fs::create_dir_all(&folder).map_err(KernelError::io("create", &folder))?;
    }
    for (name, content) in [("sources.list", sources), ("apt.conf", &apt_conf(root))] {
        let file = root.join(name);
        fs::write(&file, content).map_err(KernelError::io("write", &file))?;
    }
    Ok(())
}

/// Read after the machine's configuration, of which a proxy stays in force and hooks do not.
fn apt_conf(root: &Path) -> String {
    let root = root.display();
    format!(
        "#clear APT::Update::Pre-Invoke;\n\
         #clear APT::Update::Post-Invoke;\n\
         #clear APT::Update::Post-Invoke-Success;\n\
         #clear DPkg::Post-Invoke;\n\
         Dir::State \"{root}/state\";\n\
         Dir::State::status \"/dev/null\";\n\
         Dir::Cache \"{root}/cache\";\n\
         Dir::Etc::sourcelist \"{root}/sources.list\";\n\
         Dir::Etc::sourceparts \"/dev/null\";\n\
         Dir::Etc::preferences \"/dev/null\";\n\
         Dir::Etc::preferencesparts \"/dev/null\";\n\
         APT::Get::AllowUnauthenticated \"false\";\n\
         APT::Sandbox::User \"root\";\n\
         APT::Update::Error-Mode \"any\";\n\
         Acquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n\
         Acquire::Languages \"none\";\n\
         Acquire::Retries \"2\";\n"
    )
}

fn apt_get(root: &Path) -> std::process::Command {
    let mut command = tools::command("apt-get");
    command.current_dir(root).arg("-q").arg("-c").arg(root.join("apt.conf"));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_debian_archives_are_mirrors_and_each_is_listed_once() {
        let targets = "http://one.invalid/debian/ bookworm main\n\
                       http://one.invalid/debian/ bookworm-updates main\n\
                       http://one.invalid/debian/ trixie main\n\
                       http://one.invalid/debian-security/ bookworm-security main\n\
                       https://node.invalid/ nodistro main\n\
                       cdrom:// bookworm main\n\
                       http://two.invalid/debian/ bookworm contrib\n\
                       broken line\n\
                       https://three.invalid/ sid main\n";
        assert_eq!(
            parse_mirrors(targets),
            ["http://one.invalid/debian/", "https://three.invalid/"]
        );
    }

    /// Both formats of apt's sources, as apt itself reads them.
    #[test]
    fn apt_reads_one_line_and_deb822_sources() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let parts = folder.path().join("parts");
        fs::create_dir(&parts).expect("create");
        fs::write(folder.path().join("list"), "deb http://one.invalid/debian bookworm main\n")
            .expect("write");
        let deb822 = "Types: deb\nURIs: http://two.invalid/debian\nSuites: sid\nComponents: main\n\n\
                      Types: deb\nURIs: http://off.invalid/debian\nSuites: sid\nComponents: main\nEnabled: no\n";
        fs::write(parts.join("two.sources"), deb822).expect("write");
        let mut apt = tools::command("apt-get");
        apt.args(INDEX_TARGETS)
            .arg("-o")
            .arg(format!("Dir::Etc::sourcelist={}/list", folder.path().display()));
        apt.arg("-o").arg(format!("Dir::Etc::sourceparts={}", parts.display()));
        let Ok(output) = apt.output() else { return };
        let mirrors = parse_mirrors(&String::from_utf8_lossy(&output.stdout));
        assert_eq!(mirrors, ["http://one.invalid/debian/", "http://two.invalid/debian/"]);
    }

    #[test]
    fn a_packages_version_is_read_from_its_file_name() {
        assert_eq!(
            version_of("linux-source-7.2_7.2.13-1_all.deb", "linux-source-7.2").as_deref(),
            Some("7.2.13-1")
        );
        assert_eq!(version_of("x_1%3a2_amd64.deb", "x").as_deref(), Some("1:2"));
        for other in ["y_1_all.deb", "x_1_all.txt", "x-1_2_all.deb", "x_1.deb"] {
            assert_eq!(version_of(other, "x"), None, "{other}");
        }
    }

    #[test]
    fn sources_name_the_keyring_and_every_suite() {
        let list = sources_list(
            "http://m.invalid/debian/",
            "/k.gpg",
            &["sid".to_owned(), "forky".to_owned()],
        );
        assert_eq!(list.lines().count(), 2);
        assert!(
            list.lines()
                .all(|line| line.starts_with("deb [signed-by=/k.gpg] http://m.invalid/debian/ ")),
            "{list}"
        );
    }
}
