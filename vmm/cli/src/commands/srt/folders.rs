//! The host's paths that a cell of `srt`'s settings has. Begin at [`Folders::of`].
//!
//! What is granted comes first; a deny then beats each grant that it meets, above it, below it or at
//! the same place. Directories between a grant and what is denied in it become mount points of their
//! own: the cell could rename them otherwise, and this run or the next would look in the wrong place.
//!
//! Paths are told apart by where they are, their links followed. A link that the cell could replace
//! is followed for nobody.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use exocell_cell::xgate::CapabilitySet;

/// What `srt` itself lets nobody write, wherever it may write: programs of the host run it. A name
/// is one in any case of its letters, as for `srt`.
const ALWAYS_DENIED: [&str; 15] = [
    ".bashrc",
    ".bash_profile",
    ".zshrc",
    ".zprofile",
    ".profile",
    ".gitconfig",
    ".gitmodules",
    ".ripgreprc",
    ".mcp.json",
    ".vscode",
    ".idea",
    ".claude/commands",
    ".claude/agents",
    ".git/config",
    ".git/hooks",
];
/// `srt` does not look in it for these.
const NOT_SEARCHED: &str = "node_modules";
/// As many as Linux follows (path_resolution(7)).
const LINKS_MAX: u32 = 40;

/// The four lists of `srt`'s settings: absolute paths, as they are spelled.
#[derive(Debug, Default)]
pub struct Lists {
    pub allow_write: Vec<PathBuf>,
    pub deny_write: Vec<PathBuf>,
    pub allow_read: Vec<PathBuf>,
    pub deny_read: Vec<PathBuf>,
}

/// One path that the cell has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Folder {
    /// As it is spelled: links on the way are followed when the cell is made.
    pub from: PathBuf,
    pub is_writable: bool,
    /// Whether the settings grant it; others only keep to what they deny.
    is_granted: bool,
}

/// What a cell is given.
#[derive(Debug, Default)]
pub struct Folders {
    /// By where they are, on the host and in the cell.
    pub shared: BTreeMap<PathBuf, Folder>,
    /// Directories of these that the cell sees empty.
    pub hidden: BTreeSet<PathBuf>,
    /// What may be read in spite of a deny around it.
    readable: Vec<PathBuf>,
}

impl Folders {
    /// What `lists` say for a program in the directory `here`. What nobody may write is looked for
    /// `depth` directories below what may be written.
    ///
    /// # Errors
    /// A cell cannot keep to them.
    pub fn of(here: &Path, lists: &Lists, depth: usize) -> Result<Self, String> {
        let mut own = Self::default();
        let this = [here.to_owned()];
        let granted: [(&str, &[PathBuf], bool); 3] = [
            ("this directory", &this, false),
            ("filesystem.allowRead", &lists.allow_read, false),
            ("filesystem.allowWrite", &lists.allow_write, true),
        ];
        for (field, paths, is_writable) in granted {
            for path in paths {
                own.grant(path, is_writable).map_err(|why| format!("{field}: {why}"))?;
            }
        }
        // Again, for now it is known which links the cell could replace.
        for (field, paths, _) in granted {
            for path in paths {
                own.place(path).map_err(|why| format!("{field}: {why}"))?;
            }
        }
        let readable = lists.allow_read.iter().map(|path| own.place(path));
        own.readable = readable.collect::<Result<_, _>>()?;
        for path in &lists.deny_write {
            let kept = own.place(path).and_then(|path| own.keep(&path));
            kept.map_err(|why| format!("filesystem.denyWrite: {why}"))?;
        }
        own.keep_always(depth)?;
        let hidden = lists.deny_read.iter().map(|path| own.place(path));
        let hidden = hidden.collect::<Result<BTreeSet<_>, _>>();
        let denied = |why| format!("filesystem.denyRead: {why}");
        // A directory before what is in it.
        for path in hidden.map_err(denied)? {
            own.hide(&path).map_err(denied)?;
        }
        match own.shared.len() > CapabilitySet::FOLDERS_MAX {
            true => Err(format!(
                "these are {} mounts, most of them for what srt itself lets nobody write, and a \
                 cell has at most {}; allow less, or lower mandatoryDenySearchDepth",
                own.shared.len(),
                CapabilitySet::FOLDERS_MAX
            )),
            false => Ok(own),
        }
    }

    fn grant(&mut self, path: &Path, is_writable: bool) -> Result<(), String> {
        let real = self.place(path)?;
        if !real.exists() {
            return Ok(());
        }
        if is_writable && let Some(name) = real.ancestors().find_map(always_denied) {
            return Err(format!(
                "{} is {name}, or lies in it, which srt itself lets nobody write; leave it out",
                path.display()
            ));
        }
        let folder = Folder { from: path.to_owned(), is_writable, is_granted: true };
        self.shared.insert(real, folder);
        Ok(())
    }

    /// Where `path` is, which need not exist.
    fn place(&self, path: &Path) -> Result<PathBuf, String> {
        let mut left = parts(path);
        let mut real = PathBuf::from("/");
        let mut links = 0;
        while let Some(part) = left.pop() {
            if part == ".." {
                real.pop();
                continue;
            }
            let next = real.join(part);
            let Ok(target) = next.read_link() else {
                real = next;
                continue;
            };
            links += 1;
            if links > LINKS_MAX {
                return Err(format!("{} goes through a loop of links", path.display()));
            }
            if let Some((_, true)) = self.around(&next) {
                return Err(format!(
                    "{} is a symbolic link in what may be written, and a cell could put another \
                     in its place; put there what it leads to, or allow less",
                    next.display()
                ));
            }
            if target.is_absolute() {
                real = PathBuf::from("/");
            }
            left.extend(parts(&target));
        }
        if real == Path::new("/") {
            return Err(format!(
                "{}: the whole host is nothing for a cell; name less",
                path.display()
            ));
        }
        match real.to_string_lossy().contains([':', ',']) {
            true => {
                Err(format!("{}: a path with a colon or a comma cannot be shared", real.display()))
            }
            false => Ok(real),
        }
    }

    /// The nearest path around `path`, or it, that the cell has; whether that may be written.
    fn around(&self, path: &Path) -> Option<(PathBuf, bool)> {
        path.ancestors()
            .find_map(|one| self.shared.get_key_value(one))
            .map(|(at, folder)| (at.clone(), folder.is_writable))
    }

    /// Lets nobody write `path`, nor anything in it.
    fn keep(&mut self, path: &Path) -> Result<(), String> {
        for (_, folder) in self.shared.iter_mut().filter(|(at, _)| at.starts_with(path)) {
            folder.is_writable = false;
        }
        let Some((_, is_writable)) = self.around(path) else { return Ok(()) };
        if is_writable {
            // Of what was searched for, the last part may be a link.
            self.place(path)?;
            if !path.exists() {
                return Err(format!(
                    "{} is not there, and a cell could make it; make it first",
                    path.display()
                ));
            }
            self.add(path, false);
        }
        self.pin(path);
        Ok(())
    }

    /// The same for what `srt` itself lets nobody write.
    fn keep_always(&mut self, depth: usize) -> Result<(), String> {
        let roots = self.shared.iter().filter(|(_, folder)| folder.is_writable);
        let roots: Vec<PathBuf> = roots.map(|(path, _)| path.clone()).collect();
        let mut found = Vec::new();
        for root in roots.iter().filter(|root| root.is_dir()) {
            search(root, depth, &mut found);
        }
        for path in &found {
            self.keep(path).map_err(|why| format!("what srt itself lets nobody write: {why}"))?;
        }
        Ok(())
    }

    /// Lets nobody read `path`, if the cell would see it at all.
    fn hide(&mut self, path: &Path) -> Result<(), String> {
        if self.readable.iter().any(|allowed| allowed == path) {
            return Ok(());
        }
        let readable = self.readable.clone();
        let is_allowed = |at: &Path| {
            readable.iter().any(|allowed| at.starts_with(allowed) && allowed.starts_with(path))
        };
        let mut within = self.shared.iter().filter(|(at, _)| at.starts_with(path));
        if let Some((at, _)) = within.find(|(at, folder)| folder.is_granted && !is_allowed(at)) {
            return Err(format!(
                "{} is, or holds, {}, which the cell has; name that in filesystem.allowRead, or \
                 deny less",
                path.display(),
                at.display()
            ));
        }
        if self.around(path).is_none() || !path.exists() {
            return Ok(());
        }
        if !path.is_dir() {
            return Err(format!(
                "{} is a file of a folder that the cell has; a cell hides directories only",
                path.display()
            ));
        }
        // Files in memory come over what is shared.
        if let Some(at) = self.readable.iter().find(|at| at.starts_with(path) && at.exists()) {
            return Err(format!(
                "{} holds {}, which filesystem.allowRead names, and a cell hides a directory of \
                 its folders with all that is in it; deny less",
                path.display(),
                at.display()
            ));
        }
        self.shared.retain(|at, folder| folder.is_granted || !at.starts_with(path));
        if !path.ancestors().any(|around| self.hidden.contains(around)) {
            self.pin(path);
            self.hidden.insert(path.to_owned());
        }
        Ok(())
    }

    /// Makes mount points of the directories on the way to `path` that the cell could rename.
    fn pin(&mut self, path: &Path) {
        for one in path.parent().into_iter().flat_map(Path::ancestors) {
            if self.around(one).is_some_and(|(at, is_writable)| is_writable && at != one) {
                self.add(one, true);
            }
        }
    }

    fn add(&mut self, path: &Path, is_writable: bool) {
        let folder = Folder { from: path.to_owned(), is_writable, is_granted: false };
        self.shared.entry(path.to_owned()).or_insert(folder);
    }
}

/// The parts of a path, the last one first.
fn parts(path: &Path) -> Vec<OsString> {
    let is_part =
        |part: &Component<'_>| matches!(part, Component::Normal(_) | Component::ParentDir);
    let parts = path.components().filter(is_part);
    parts.rev().map(|part| part.as_os_str().to_owned()).collect()
}

/// The name by which `path` is what `srt` lets nobody write.
fn always_denied(path: &Path) -> Option<&'static str> {
    let is_it = |name: &&str| {
        let mut own = path.components().rev().map(Component::as_os_str);
        name.rsplit('/').all(|part| own.next().is_some_and(|own| own.eq_ignore_ascii_case(part)))
    };
    ALWAYS_DENIED.into_iter().find(is_it)
}

/// What there is of these names in `folder` and `depth` directories below it. `srt` does not look
/// into directories of packages, nor through links.
fn search(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    // What cannot be read by whoever starts the cell is nothing that the cell could write.
    let Ok(entries) = folder.read_dir() else { return };
    for entry in entries.flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let Ok(kind) = entry.file_type() else { continue };
        // A link in the place of .git or .claude leads to a directory that is not known as one.
        let is_other = kind.is_symlink()
            && [".git", ".claude"].into_iter().any(|own| name.eq_ignore_ascii_case(own));
        if is_other || always_denied(&path).is_some() {
            found.push(path);
        } else if kind.is_dir() && depth > 0 && name != NOT_SEARCHED {
            search(&path, depth - 1, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A directory, with these below it.
    fn project(folders: &[&str]) -> tempfile::TempDir {
        let place = tempfile::tempdir().unwrap();
        for folder in folders {
            fs::create_dir_all(place.path().join(folder)).unwrap();
        }
        place
    }

    /// `allowWrite`, `denyWrite`, `allowRead`, `denyRead` below `here`.
    fn made(
        here: &Path,
        [write, no_write, read, no_read]: [&[&str]; 4],
    ) -> Result<Folders, String> {
        let list = |paths: &[&str]| paths.iter().map(|path| here.join(path)).collect();
        let lists = Lists {
            allow_write: list(write),
            deny_write: list(no_write),
            allow_read: list(read),
            deny_read: list(no_read),
        };
        Folders::of(here, &lists, 3)
    }

    /// What may be written, what can be read, and what is hidden: below `here`.
    fn seen(here: &Path, folders: &Folders) -> [Vec<String>; 3] {
        let name = |path: &Path| path.strip_prefix(here).unwrap().display().to_string();
        let of = |is_writable: bool| {
            let own = folders.shared.iter().filter(|(_, own)| own.is_writable == is_writable);
            own.map(|(path, _)| name(path)).collect()
        };
        [of(true), of(false), folders.hidden.iter().map(|path| name(path)).collect()]
    }

    #[track_caller]
    fn sees(place: &tempfile::TempDir, lists: [&[&str]; 4], expected: [&[&str]; 3]) {
        let here = place.path().canonicalize().unwrap();
        let folders = made(&here, lists).unwrap();
        let expected = expected.map(|own| own.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(seen(&here, &folders), expected);
    }

    #[track_caller]
    fn refuses(place: &tempfile::TempDir, here: &str, lists: [&[&str]; 4], words: &[&str]) {
        let here = place.path().canonicalize().unwrap().join(here);
        let error = made(&here, lists).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }

    #[test]
    fn a_deny_beats_what_is_granted_in_it() {
        let place = project(&["keep/deep/er", "a/keep"]);
        let deep: [&[&str]; 4] = [&[".", "keep/deep"], &["keep"], &[], &[]];
        sees(&place, deep, [&[""], &["keep", "keep/deep"], &[]]);
        sees(&place, [&["keep/deep"], &["keep"], &[], &[]], [&[], &["", "keep/deep"], &[]]);
        sees(&place, [&["."], &["."], &[], &[]], [&[], &[""], &[]]);
        sees(&place, [&["keep"], &[".."], &[], &[]], [&[], &["", "keep"], &[]]);
        // It is a mount point anyway, and what is around it could be renamed.
        let own: [&[&str]; 4] = [&[".", "a/keep"], &["a/keep"], &[], &[]];
        sees(&place, own, [&["", "a"], &["a/keep"], &[]]);
        let both: [&[&str]; 4] = [&["."], &["keep/deep/er", "keep/deep"], &[], &[]];
        sees(&place, both, [&["", "keep"], &["keep/deep", "keep/deep/er"], &[]]);
        refuses(&place, "", [&["."], &["new"], &[], &[]], &["denyWrite", "make it first"]);
    }

    #[test]
    fn what_is_hidden_holds_nothing_that_is_granted() {
        let place = project(&["srt/data/ok", "srt/a/secrets/x"]);
        let lists: [[&[&str]; 4]; 3] = [
            [&[], &[], &[], &[".."]],
            [&["."], &[], &[], &["..", "../none"]],
            [&["."], &[], &["data"], &[".."]],
        ];
        for lists in lists {
            refuses(&place, "srt", lists, &["denyRead", "holds", "allowRead"]);
        }
        refuses(&place, "srt", [&[], &[], &[], &["."]], &["denyRead"]);
        // Files in memory come over what is shared.
        refuses(&place, "srt", [&["."], &[], &["data/ok"], &["data"]], &["data/ok", "deny less"]);
        let here = place.path().canonicalize().unwrap().join("srt");
        let outside = made(&here, [&["data"], &[], &["."], &[".."]]).unwrap();
        assert!(outside.hidden.is_empty());
    }

    #[test]
    fn what_is_denied_stays_where_it_is() {
        let place = project(&["a/secrets/x", "b/kept/data"]);
        let lists: [&[&str]; 4] = [&["."], &["b/kept"], &[], &["a/secrets", "a/secrets/x"]];
        sees(&place, lists, [&["", "a", "b"], &["b/kept"], &["a/secrets"]]);
        // Nobody renames what may only be read, unless it lies in what may be written.
        sees(&place, [&[], &[], &[], &["a/secrets"]], [&[], &[""], &["a/secrets"]]);
        let between: [&[&str]; 4] = [&["."], &[], &["b/kept"], &["b/kept/data"]];
        sees(&place, between, [&["", "b"], &["b/kept"], &["b/kept/data"]]);
        let all: [&[&str]; 4] = [&["."], &["b/kept"], &[], &["a/secrets", "a", "b"]];
        sees(&place, all, [&[""], &[], &["a", "b"]]);
    }

    #[test]
    fn what_nobody_may_write_is_found_where_it_is() {
        let place = project(&[
            ".git/hooks",
            ".vscode/deep",
            "one/two/.git/hooks",
            "one/two/three/four/.idea",
            "one/.Claude/Agents",
            "node_modules/x/.idea",
        ]);
        for file in [".git/config", "one/.BashRC", "one/two/.mcp.json", "one/.claude"] {
            fs::write(place.path().join(file), "").unwrap();
        }
        let kept: [&str; 8] = [
            ".git/config",
            ".git/hooks",
            ".vscode",
            ".vscode/deep",
            "one/.BashRC",
            "one/.Claude/Agents",
            "one/two/.git/hooks",
            "one/two/.mcp.json",
        ];
        let open: [&str; 6] = ["", ".git", "one", "one/.Claude", "one/two", "one/two/.git"];
        // A directory on the way to what is denied is no grant.
        sees(&place, [&["."], &[".vscode/deep"], &[], &[]], [&open, &kept, &[]]);
        sees(
            &place,
            [&[".git"], &[], &[], &[]],
            [&[".git"], &["", ".git/config", ".git/hooks"], &[]],
        );
        sees(&place, [&[], &[], &[".git/hooks"], &[]], [&[], &["", ".git/hooks"], &[]]);
        for (path, name) in [
            (".git/hooks", ".git/hooks"),
            (".vscode", ".vscode"),
            (".vscode/deep", ".vscode"),
            ("one/.BashRC", ".bashrc"),
            ("one/.Claude/Agents", ".claude/agents"),
        ] {
            refuses(&place, "", [&[path], &[], &[], &[]], &["filesystem.allowWrite", name]);
        }
        refuses(&place, ".vscode/deep", [&["."], &[], &[], &[]], &["filesystem.allowWrite"]);
        let many: Vec<String> = (0..300).map(|at| format!("many/{at}/.idea")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let place = project(&many);
        refuses(&place, "", [&["."], &[], &[], &[]], &["mandatoryDenySearchDepth"]);
    }

    #[test]
    fn links_are_followed_where_no_cell_can_put_another() {
        let place = project(&["real/secrets", "real/.git/hooks", "own"]);
        let here = place.path().canonicalize().unwrap();
        symlink("real", here.join("link")).unwrap();
        symlink(here.join("loop"), here.join("loop")).unwrap();
        let own = here.join("own");
        let lists: [&[&str]; 4] = [&["../link"], &["../real/.git"], &[], &["../link/secrets"]];
        let folders = made(&own, lists).unwrap();
        let kept = ["own", "real/.git"].map(ToString::to_string).to_vec();
        assert_eq!(seen(&here, &folders)[..2], [vec!["real".to_owned()], kept]);
        assert_eq!(folders.hidden, [here.join("real/secrets")].into());
        assert_eq!(folders.shared[&here.join("real")].from, own.join("../link"));
        for lists in [
            [&["."][..], &["link"], &[], &[]],
            [&["."], &[], &[], &["link/secrets"]],
            [&[".", "link"], &[], &[], &[]],
            [&["."], &[], &["link"], &[]],
        ] {
            refuses(&place, "", lists, &["link is a symbolic link in what may be written"]);
        }
        refuses(&place, "", [&["loop"], &[], &[], &[]], &["loop of links"]);
        fs::rename(here.join("real/.git"), here.join("real/git")).unwrap();
        symlink("git", here.join("real/.git")).unwrap();
        refuses(
            &place,
            "own",
            [&["../real"], &[], &[], &[]],
            &["srt itself", ".git is a symbolic link"],
        );
    }
}
