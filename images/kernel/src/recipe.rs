//! What is built: the pinned source, the patches and the config fragments.

use std::path::Path;

use sha2::{Digest, Sha256};

use crate::config::Wanted;
use crate::error::KernelError;
use crate::pin::Pin;

/// The files of `guest-kernel-patches/`, as (path below it, content).
const EMBEDDED: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// `guest-kernel-patches/series.stock`: no part of the embedded recipe's hash.
const STOCK_SERIES: &str = include_str!("../../../guest-kernel-patches/series.stock");
/// `guest-kernel-patches/kvm/`, what a guest kernel on KVM has otherwise: no part of the embedded
/// recipe's hash either.
const MACHINE: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/machine.rs"));
const MACHINE_FOLDER: &str = "kvm/";
/// Behind all other fragments in the order of names, so that its lines win.
const MACHINE_CONFIG: &str = "config/machine.config";

/// What a kernel is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    /// User-mode Linux: a program of the host, for the platform `para`.
    Um,
    /// A machine, for the platform `kvm`.
    X86,
}

impl Arch {
    /// As make is told.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Um => "um",
            Self::X86 => "x86_64",
        }
    }

    /// What is made, and its place in the tree: an ELF executable for each.
    pub(crate) fn target(self) -> &'static str {
        match self {
            Self::Um => "linux",
            Self::X86 => "vmlinux",
        }
    }
}

/// The files that say which kernel is built.
#[derive(Debug, Clone)]
pub struct Recipe {
    arch: Arch,
    files: Vec<(String, String)>,
}

impl Recipe {
    /// The recipe that was compiled into this program.
    pub fn embedded() -> Self {
        Self::from_files(EMBEDDED.iter().copied())
    }

    /// What the measurements compare with: of our patches only those that `series.stock` lists,
    /// and of our config lines only those whose symbols are then known.
    pub fn stock() -> Self {
        Self::embedded().with_series(STOCK_SERIES)
    }

    /// The kernel of cells on KVM: the same source and features for x86-64, of our patches those
    /// that `kvm/series` lists, and what else is in that folder.
    pub fn kvm() -> Self {
        let own = || {
            MACHINE.iter().map(|(path, text)| {
                (path.strip_prefix(MACHINE_FOLDER).unwrap_or(path), (*text).to_owned())
            })
        };
        let series = own().find(|(name, _)| *name == "series").unwrap_or_default().1;
        let mut recipe = Self::embedded().with_series(&series);
        recipe.arch = Arch::X86;
        recipe.files.extend(own().filter_map(|(name, text)| match name {
            "series" => None,
            "machine.config" => Some((MACHINE_CONFIG.to_owned(), text)),
            name => Some((name.to_owned(), text)),
        }));
        recipe.files.sort();
        recipe
    }

    /// What this recipe's kernel is built for.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// This recipe with fewer patches. The config symbols that a patch left out would have defined
    /// are left out too.
    pub fn with_series(mut self, series: &str) -> Self {
        let kept = patch_names(series);
        let (stays, goes): (Vec<_>, Vec<_>) = self
            .files
            .into_iter()
            .partition(|(name, _)| !name.ends_with(".patch") || kept.contains(&name.as_str()));
        let lost: Vec<&str> = goes.iter().flat_map(|(_, text)| defined_symbols(text)).collect();
        self.files = stays;
        for (name, text) in &mut self.files {
            match name.as_str() {
                "series" => series.clone_into(text),
                name if name.ends_with(".config") => *text = without_symbols(text, &lost),
                _ => {}
            }
        }
        self
    }

    /// A recipe for ARCH=um from (path, content) pairs, laid out as in `guest-kernel-patches/`.
    pub fn from_files<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut files: Vec<(String, String)> = files
            .into_iter()
            .map(|(path, content)| (path.to_owned(), content.to_owned()))
            .collect();
        files.sort();
        Self { arch: Arch::Um, files }
    }

    /// The name of this recipe's kernel in the cache: 32 hexadecimal digits over every file that
    /// can change the kernel. The compiler is not part of it; the manifest records it.
    pub fn hash(&self) -> String {
        let mut hasher = Sha256::new();
        for (path, content) in &self.files {
            hasher.update((path.len() as u64).to_le_bytes());
            hasher.update(path);
            hasher.update((content.len() as u64).to_le_bytes());
            hasher.update(content);
        }
        hex(&hasher.finalize()[..16])
    }

    pub(crate) fn pin(&self) -> Result<Pin, KernelError> {
        Pin::parse(self.file("KERNEL").unwrap_or_default())
    }

    /// The patches as (file name, content), in the order of `series`.
    pub(crate) fn patches(&self) -> Result<Vec<(&str, &str)>, KernelError> {
        let names = self.series();
        if let Some(stray) = self.with_extension("patch").find(|(name, _)| !names.contains(name)) {
            return Err(KernelError::Series(format!("does not list {}", stray.0)));
        }
        let missing = |name: &str| KernelError::Series(format!("lists {name}, which is not there"));
        names
            .into_iter()
            .map(|name| Ok((name, self.file(name).ok_or_else(|| missing(name))?)))
            .collect()
    }

    /// The config fragments' text, one after the other, for `KCONFIG_ALLCONFIG`.
    pub(crate) fn merged_config(&self) -> String {
        self.with_extension("config").map(|(_, text)| format!("{text}\n")).collect()
    }

    pub(crate) fn wanted_config(&self) -> Result<Wanted, KernelError> {
        let mut wanted = Wanted::default();
        for (name, text) in self.with_extension("config") {
            wanted.merge(name, text)?;
        }
        Ok(wanted)
    }

    fn series(&self) -> Vec<&str> {
        patch_names(self.file("series").unwrap_or_default())
    }

    fn file(&self, path: &str) -> Option<&str> {
        self.files.iter().find(|(name, _)| name == path).map(|(_, content)| content.as_str())
    }

    fn with_extension(&self, extension: &'static str) -> impl Iterator<Item = (&str, &str)> {
        self.files
            .iter()
            .filter(move |(name, _)| {
                Path::new(name).extension().is_some_and(|found| found == extension)
            })
            .map(|(name, content)| (name.as_str(), content.as_str()))
    }
}

/// The file names of a series.
fn patch_names(series: &str) -> Vec<&str> {
    let names = series.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    names.filter(|line| !line.is_empty()).collect()
}

/// The config symbols that a patch adds to Kconfig files, without `CONFIG_`.
fn defined_symbols(patch: &str) -> impl Iterator<Item = &str> {
    let lines = patch.lines().filter_map(|line| line.strip_prefix('+'));
    lines.filter_map(|line| {
        line.strip_prefix("config ").or_else(|| line.strip_prefix("menuconfig ")).map(str::trim)
    })
}

/// The lines of a config fragment that name none of `symbols`.
fn without_symbols(fragment: &str, symbols: &[&str]) -> String {
    let named = |line: &str| {
        let rest = line.trim_start_matches("# ").strip_prefix("CONFIG_")?;
        rest.split(['=', ' ']).next().map(str::to_owned)
    };
    let stays = |line: &&str| named(line).is_none_or(|name| !symbols.contains(&name.as_str()));
    fragment.lines().filter(stays).map(|line| format!("{line}\n")).collect()
}

/// The files that a patch changes, removes or adds, as its `diff --git` lines name them.
pub(crate) fn touched_paths(patch: &str) -> impl Iterator<Item = &str> {
    patch
        .lines()
        .filter_map(|line| line.strip_prefix("diff --git a/"))
        .filter_map(|names| names.split_once(" b/"))
        .map(|(before, _)| before)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(series: &str) -> Recipe {
        Recipe::from_files([("series", series), ("1.patch", "one"), ("2.patch", "two")])
    }

    #[test]
    fn the_embedded_recipe_is_whole() {
        let recipe = Recipe::embedded();
        let pin = recipe.pin().expect("KERNEL is valid");
        assert!(pin.tarball.iter().all(|tarball| tarball.sha256.len() == 64));
        assert!(!recipe.patches().expect("series is valid").is_empty());
        assert!(
            recipe
                .wanted_config()
                .expect("fragments are valid")
                .asks_for("CONFIG_UML_PHYSMEM_FD", "y")
        );
    }

    #[test]
    fn patches_come_in_the_order_of_the_series() {
        let recipe = recipe("# a topic\n2.patch\n\n1.patch # a remark\n");
        assert_eq!(recipe.patches().expect("valid"), [("2.patch", "two"), ("1.patch", "one")]);
    }

    #[test]
    fn a_patch_that_the_series_forgets_is_an_error() {
        let error = recipe("1.patch\n").patches().expect_err("2.patch is not listed");
        assert!(error.to_string().contains("does not list 2.patch"), "{error}");
    }

    #[test]
    fn a_patch_that_is_not_there_is_an_error() {
        let error = recipe("1.patch\n2.patch\n3.patch\n").patches().expect_err("no 3.patch");
        assert!(error.to_string().contains("3.patch, which is not there"), "{error}");
    }

    #[test]
    fn a_shorter_series_drops_patches_and_the_symbols_they_define() {
        let two = "+config FAST\n+menuconfig LIST\n+\tconfig option\n config OLD\n";
        let config = "CONFIG_FAST=y\n# CONFIG_LIST is not set\nCONFIG_FASTER=y\nCONFIG_OLD=y\n";
        let recipe = Recipe::from_files([
            ("series", "1.patch\n2.patch\n"),
            ("1.patch", "one"),
            ("2.patch", two),
            ("config/a.config", config),
        ]);
        let shorter = recipe.clone().with_series("# stock\n1.patch\n");
        assert_eq!(shorter.patches().expect("valid"), [("1.patch", "one")]);
        assert_eq!(shorter.merged_config(), "CONFIG_FASTER=y\nCONFIG_OLD=y\n\n");
        assert_ne!(shorter.hash(), recipe.hash());
    }

    #[test]
    fn the_stock_recipe_is_whole_and_smaller() {
        let (stock, ours) = (Recipe::stock(), Recipe::embedded());
        let count = |recipe: &Recipe| recipe.patches().expect("series is valid").len();
        assert!((1..count(&ours)).contains(&count(&stock)));
        assert!(stock.wanted_config().expect("valid").asks_for("CONFIG_UML_PHYSMEM_FD", "y"));
    }

    #[test]
    fn the_recipe_for_kvm_has_the_same_features_and_nothing_of_um() {
        let (kvm, ours) = (Recipe::kvm(), Recipe::embedded());
        assert_eq!((kvm.arch(), ours.arch()), (Arch::X86, Arch::Um));
        assert_ne!(kvm.hash(), ours.hash());
        let wanted = kvm.wanted_config().expect("valid");
        for symbol in ["PVH", "VIRTIO_MMIO", "EXT4_FS", "VIRTIO_FS", "NF_TABLES"] {
            assert!(wanted.asks_for(&format!("CONFIG_{symbol}"), "y"), "{symbol}");
        }
        for symbol in ["STATIC_LINK", "VIRTIO_UML"] {
            assert!(wanted.asks_for(&format!("CONFIG_{symbol}"), "n"), "{symbol}");
        }
        for (name, text) in kvm.patches().expect("series is valid") {
            assert!(touched_paths(text).all(|path| !path.starts_with("arch/um")), "{name}");
        }
        let last = kvm.with_extension("config").last().expect("fragments");
        assert_eq!(last.0, MACHINE_CONFIG, "a later line wins");
    }

    #[test]
    fn the_hash_depends_on_content_and_names_but_not_on_order() {
        let one = Recipe::from_files([("a", "x"), ("b", "y")]).hash();
        assert_eq!(one, Recipe::from_files([("b", "y"), ("a", "x")]).hash());
        assert_eq!(one.len(), 32);
        assert_ne!(one, Recipe::from_files([("a", "x"), ("b", "z")]).hash());
        assert_ne!(one, Recipe::from_files([("a", "xb"), ("", "y")]).hash());
        assert_ne!(one, Recipe::from_files([("a", "x"), ("c", "y")]).hash());
    }

    #[test]
    fn touched_paths_are_those_of_the_diff_lines() {
        let patch = "diff --git a/mm/a.c b/mm/a.c\nindex 1..2\n-diff\ndiff --git a/b b/b\n";
        assert_eq!(touched_paths(patch).collect::<Vec<_>>(), ["mm/a.c", "b"]);
    }
}
