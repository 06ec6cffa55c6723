//! Who a program runs as: `name|uid[:group|gid]` against /etc/passwd and
//! /etc/group, by docker's rules.

use crate::error::InitError;
use crate::paths;

/// A resolved user.
#[derive(Debug, PartialEq, Eq)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups; none when the group was named explicitly.
    pub groups: Vec<u32>,
    pub home: String,
}

/// User databases longer than this are read this far, in bytes.
const DATABASE_BYTES_MAX: u64 = 4 << 20;

/// A user database; a missing one is empty, and so is one that is no file: a pipe
/// would be waited for.
pub fn database(path: &str) -> String {
    let bytes = paths::read(path, DATABASE_BYTES_MAX).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Whether `file`, of users or of groups, has `name`.
pub fn has(name: &str, file: &str) -> bool {
    Line::all(file).any(|line| line.field(0) == name)
}

/// Whether nobody has the number `id`.
pub fn is_free(id: u32, passwd: &str, group: &str) -> bool {
    let taken = |line: Line| line.number(2) == Some(id);
    !Line::all(passwd).any(taken) && !Line::all(group).any(taken)
}

/// The name of `id` in `file`, of users or of groups; the number where it has none.
pub fn name_of(id: u32, file: &str) -> String {
    let named = Line::all(file).find(|line| line.number(2) == Some(id));
    named.map_or_else(|| id.to_string(), |line| line.field(0).to_owned())
}

/// A line of /etc/passwd or /etc/group, split at its colons.
struct Line<'a>(Vec<&'a str>);

impl<'a> Line<'a> {
    fn all(file: &'a str) -> impl Iterator<Item = Self> {
        file.lines().map(|line| Self(line.trim().split(':').collect()))
    }

    fn field(&self, index: usize) -> &'a str {
        self.0.get(index).copied().unwrap_or_default()
    }

    fn number(&self, index: usize) -> Option<u32> {
        self.field(index).parse().ok()
    }

    /// Field 0 is the name and field 2 the id, in both files.
    fn is(&self, who: &str) -> bool {
        self.field(0) == who || (self.number(2).is_some() && self.number(2) == who.parse().ok())
    }
}

/// Resolves `spec`; empty is root.
///
/// # Errors
/// [`FailureKind::Invalid`](exocell_agent::FailureKind::Invalid) for a name
/// that neither file has; an unknown number is taken as it is.
pub fn resolve(spec: &str, passwd: &str, group: &str) -> Result<Identity, InitError> {
    let (user, named_group) = match spec.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (spec, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let mut identity = resolve_user(user, passwd, group)?;
    if let Some(named) = named_group {
        identity.gid = resolve_group(named, group)?;
        identity.groups.clear();
    }
    check(identity.uid)?;
    check(identity.gid)?;
    identity.groups.iter().try_for_each(|group| check(*group))?;
    Ok(identity)
}

/// Whether the kernel takes `id` as it is: by the last one it is told to leave an id alone
/// (setresuid(2)). The bound is docker's.
fn check(id: u32) -> Result<(), InitError> {
    match i32::try_from(id) {
        Ok(_) => Ok(()),
        Err(_) => Err(InitError::invalid(format!(
            "user or group {id}: ids are from 0 to {}; use one of these (--user)",
            i32::MAX
        ))),
    }
}

fn resolve_user(user: &str, passwd: &str, group: &str) -> Result<Identity, InitError> {
    if let Some(line) = Line::all(passwd).find(|line| line.is(user)) {
        let (Some(uid), Some(gid)) = (line.number(2), line.number(3)) else {
            return Err(InitError::invalid(format!("user {user}: its /etc/passwd line is broken")));
        };
        let home = match line.field(5) {
            "" => "/",
            home => home,
        };
        let groups = groups_of(line.field(0), group);
        return Ok(Identity { uid, gid, groups, home: home.into() });
    }
    let uid = user.parse().map_err(|_| {
        InitError::invalid(format!(
            "no user {user} in the cell's /etc/passwd; use a number (--user)"
        ))
    })?;
    Ok(Identity { uid, gid: 0, groups: Vec::new(), home: "/".into() })
}

/// The group named `named`, or of that number.
///
/// # Errors
/// As [`resolve`]'s.
pub fn resolve_group(named: &str, group: &str) -> Result<u32, InitError> {
    let known = Line::all(group).find(|line| line.is(named)).and_then(|line| line.number(2));
    let id = known.or_else(|| named.parse().ok()).ok_or_else(|| {
        InitError::invalid(format!("no group {named} in the cell's /etc/group; use a number"))
    })?;
    check(id).map(|()| id)
}

fn groups_of(name: &str, group: &str) -> Vec<u32> {
    let has = |line: &Line| line.field(3).split(',').any(|member| member == name);
    Line::all(group).filter(has).filter_map(|line| line.number(2)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/sh\nann:x:1000:1001::/home/ann:\nbad:x:y:z::\n";
    const GROUP: &str = "root:x:0:\nann:x:1001:\naudio:x:29:ann,bob\nwheel:x:10:bob\n";

    fn id(spec: &str) -> (u32, u32, Vec<u32>, String) {
        let found = resolve(spec, PASSWD, GROUP).unwrap();
        (found.uid, found.gid, found.groups, found.home)
    }

    #[test]
    fn users_and_groups_resolve_by_name_and_number() {
        assert_eq!(id(""), (0, 0, vec![], "/root".into()));
        assert_eq!(id("ann"), (1000, 1001, vec![29], "/home/ann".into()));
        assert_eq!(id("1000"), (1000, 1001, vec![29], "/home/ann".into()));
        assert_eq!(id("ann:wheel"), (1000, 10, vec![], "/home/ann".into()));
        assert_eq!(id("4242"), (4242, 0, vec![], "/".into()));
        assert_eq!(id("4242:77"), (4242, 77, vec![], "/".into()));
        assert_eq!(id(":29"), (0, 29, vec![], "/root".into()));
        assert_eq!(id("ann:"), (1000, 1001, vec![29], "/home/ann".into()));
    }

    #[test]
    fn unknown_names_and_broken_lines_are_refused() {
        let kept = ["4294967295", "1000:4294967295", "2147483648"];
        for spec in ["nobody", "ann:nogroup", "bad", "-1", "4294967296"].into_iter().chain(kept) {
            assert!(resolve(spec, PASSWD, GROUP).is_err(), "{spec}");
        }
        assert!(resolve("ann", "", "").is_err());
        assert_eq!(resolve("0", "", "").unwrap().home, "/");
    }
}
