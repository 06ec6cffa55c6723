//! `Account`: a user whom the image may not have.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::Path;

use crate::error::{Context, InitError};
use crate::{paths, users};

/// The first id that is tried, as useradd(8) has it.
const ID_MIN: u32 = 1000;
const ID_MAX: u32 = 60_000;
/// The longest name (useradd(8)).
const NAME_BYTES_MAX: usize = 32;
const SUDOERS: &str = "/etc/sudoers.d";

/// Makes the user `name` where there is none: a group of that name, a home, and where the image
/// has sudo the right to use it without a password.
pub fn ensure(name: &str) -> Result<(), InitError> {
    check(name)?;
    let [passwd, group] = ["/etc/passwd", "/etc/group"].map(users::database);
    if users::has(name, &passwd) {
        return Ok(());
    }
    DirBuilder::new().mode(0o755).recursive(true).create("/etc").context(|| "making /etc")?;
    let id = (ID_MIN..ID_MAX).find(|id| users::is_free(*id, &passwd, &group));
    let id = id.ok_or_else(|| InitError::guest("there is no id left for a user"))?;
    let home = format!("/home/{name}");
    let shell = ["/bin/bash", "/bin/sh"].into_iter().find(|shell| Path::new(shell).exists());
    let shell = shell.unwrap_or("/sbin/nologin");
    let gid = users::resolve_group(name, &group).unwrap_or(id);
    let failed = |file: &'static str| move || format!("making the user {name}: {file}");
    if gid == id && !users::has(name, &group) {
        add("group", &group, &format!("{name}:x:{id}:")).context(failed("/etc/group"))?;
    }
    let mut lines = format!("{name}:x:{id}:{gid}::{home}:{shell}");
    // An image without users has no root by name, either.
    if !users::has("root", &passwd) {
        lines = format!("root:x:0:0:root:/root:{shell}\n{lines}");
    }
    add("passwd", &passwd, &lines).context(failed("/etc/passwd"))?;
    let made = DirBuilder::new().mode(0o755).recursive(true).create(&home);
    made.and_then(|()| chown(&home, Some(id), Some(gid))).context(failed("its home"))?;
    if Path::new(SUDOERS).is_dir() {
        let rule = format!("{name} ALL=(ALL:ALL) NOPASSWD: ALL\n");
        let path = format!("{SUDOERS}/{name}");
        let written = paths::write(SUDOERS, name, rule.as_bytes());
        written
            .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(0o440)))
            .context(failed(SUDOERS))?;
    }
    Ok(())
}

fn check(name: &str) -> Result<(), InitError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    match name.bytes().all(plain)
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name.len() <= NAME_BYTES_MAX
    {
        true => Ok(()),
        false => Err(InitError::invalid(format!("{name:?} cannot be a user's name"))),
    }
}

/// Adds lines to a file of /etc.
fn add(name: &str, before: &str, lines: &str) -> io::Result<()> {
    let end = if before.is_empty() || before.ends_with('\n') { "" } else { "\n" };
    paths::write("/etc", name, format!("{before}{end}{lines}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plain_name_is_a_user() {
        for name in ["user", "_apt", "a-b9"] {
            check(name).unwrap();
        }
        for name in ["", "Root", "9", "a:b", "a\nb", "../x", &"x".repeat(33)] {
            check(name).unwrap_err();
        }
    }
}
