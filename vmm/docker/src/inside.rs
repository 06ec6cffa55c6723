//! What a cell with the server's socket may have in the guest that it is in itself: no more than its
//! own program has. In guests of other containers their kernels are their own, and what programs may
//! there gives nothing of the host.

use exocell_cell::settings::Settings;
use exocell_cell::{CellSpec, images::Store};

use crate::containers::Containers;
use crate::error::{ApiResult, refused};

/// See the module's head.
#[derive(Debug, Clone, Default)]
pub struct Inside {
    /// The cell whose guest it is.
    guest: String,
    settings: Settings,
    /// As it was named; `None` where nobody can tell, which is nobody's power.
    user: Option<String>,
}

/// The cell in whose guest one that is made as `spec` runs.
fn guest(spec: &CellSpec) -> &str {
    spec.within.as_ref().map_or(&spec.id, |within| &within.cell)
}

fn is_root(user: &str) -> bool {
    matches!(user.split(':').next(), None | Some("" | "0" | "root"))
}

/// Without what is left out at will.
fn capability(name: &str) -> String {
    let name = name.to_ascii_uppercase();
    name.strip_prefix("CAP_").unwrap_or(&name).to_owned()
}

fn has(all: &[String], wanted: &str) -> bool {
    all.iter().any(|name| capability(name) == capability(wanted))
}

impl Inside {
    pub fn of(containers: &Containers, spec: &CellSpec) -> Self {
        let user = match containers.has_file(&spec.id) {
            // The image's is in it.
            true => containers.read(&spec.id).ok().map(|container| container.config.user),
            false => spec.user.clone().or_else(|| {
                let store = Store::open(containers.layout().images()).ok()?;
                Some(store.resolve(spec.image_name()).ok()?.config.user.clone())
            }),
        };
        Self { guest: guest(spec).to_owned(), settings: spec.settings.clone(), user }
    }

    fn is_root(&self) -> bool {
        self.user.as_deref().is_some_and(is_root)
    }

    fn check_user(&self, user: &str) -> ApiResult<()> {
        match self.is_root() || self.user.as_deref() == Some(user) {
            true => Ok(()),
            false => Err(refused(format!(
                "in its own guest a cell starts programs as its own user, {:?}, and not as {user:?}",
                self.user.as_deref().unwrap_or("unknown")
            ))),
        }
    }

    fn check_privileged(&self, privileged: bool) -> ApiResult<()> {
        match privileged && !self.settings.privileged {
            false => Ok(()),
            true => Err(refused(
                "in its own guest a cell that is not privileged starts nothing that is (privileged)",
            )),
        }
    }

    /// Whether it may start a program as `user` in the container `spec`.
    ///
    /// # Errors
    /// 403 for one that is in its own guest and would have more than itself.
    pub fn check_program(&self, spec: &CellSpec, user: &str, privileged: bool) -> ApiResult<()> {
        if guest(spec) != self.guest {
            return Ok(());
        }
        self.check_privileged(privileged)?;
        self.check_user(user)
    }

    /// Whether it may read and write the files of the container `spec` as that one's root.
    ///
    /// # Errors
    /// 403 in its own guest, where it is not root itself.
    pub fn check_files(&self, spec: &CellSpec) -> ApiResult<()> {
        match guest(spec) != self.guest || self.is_root() {
            true => Ok(()),
            false => Err(refused(
                "files in a cell's own guest are reached as its root, which this cell's program is \
                 not",
            )),
        }
    }

    /// Cuts what nobody named of a new container, whose program runs as `user`, to what the cell has
    /// where that is in its own guest.
    ///
    /// # Errors
    /// 403 for what was named and is more.
    pub fn bound(&self, spec: &mut CellSpec, user: &str) -> ApiResult<()> {
        if guest(spec) != self.guest {
            return Ok(());
        }
        let (own, wish) = (&self.settings, &mut spec.settings);
        self.check_privileged(wish.privileged)?;
        self.check_user(user)?;
        wish.no_new_privileges |= own.no_new_privileges;
        if own.privileged {
            return Ok(());
        }
        let may_add = |name: &String| {
            has(&own.cap_add, name) || has(&own.cap_add, "ALL") && !has(&own.cap_drop, name)
        };
        let added = wish.cap_add.iter().find(|name| !may_add(name));
        let what = added.map(|name| format!("the capability {name}"));
        let dropped = own.cap_drop.iter().filter(|name| !has(&wish.cap_drop, name));
        let dropped: Vec<String> = dropped.cloned().collect();
        let node = wish.devices.iter().find(|node| !own.devices.contains(node));
        let what = what.or_else(|| node.map(|node| format!("the device {}", node.device)));
        let rule = wish.device_rules.iter().find(|rule| !own.device_rules.contains(rule));
        let what = what.or_else(|| rule.map(|rule| format!("the rule of devices {rule}")));
        let paths =
            [(&wish.masked_paths, &own.masked_paths), (&wish.readonly_paths, &own.readonly_paths)];
        let is_other = paths.iter().any(|(wish, own)| wish.is_some() && wish != own);
        let what = what.or_else(|| is_other.then(|| "other hidden or read-only paths".to_owned()));
        let group = wish.groups.iter().find(|group| !self.is_root() && !own.groups.contains(group));
        let what = what.or_else(|| group.map(|group| format!("the group {group}")));
        match what {
            None => {
                wish.cap_drop.extend(dropped);
                Ok(())
            }
            Some(what) => Err(refused(format!(
                "in its own guest a container that a cell makes has at most what the cell has itself, \
                 and that has not {what}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(id: &str) -> CellSpec {
        let idle = CellSpec::idle("i", "{\"version\": 1}".to_owned()).unwrap();
        CellSpec { id: id.to_owned(), ..idle }
    }

    fn own(user: Option<&str>, settings: Settings) -> Inside {
        Inside { guest: "a".to_owned(), settings, user: user.map(str::to_owned) }
    }

    #[test]
    fn a_program_in_the_cells_own_guest_has_no_more_than_the_cell() {
        let bound = own(Some("1000"), Settings::default());
        bound.check_program(&spec("a"), "1000", false).unwrap();
        for (user, privileged) in [("0", false), ("", false), ("1000:0", false), ("1000", true)] {
            bound.check_program(&spec("a"), user, privileged).unwrap_err();
        }
        bound.check_files(&spec("a")).unwrap_err();
        // Another's guest has a kernel of its own.
        bound.check_program(&spec("b"), "0", true).unwrap();
        bound.check_files(&spec("b")).unwrap();
        let root = own(Some(""), Settings::default());
        root.check_program(&spec("a"), "1000", false).unwrap();
        root.check_program(&spec("a"), "0", true).unwrap_err();
        root.check_files(&spec("a")).unwrap();
        let privileged = Settings { privileged: true, ..Settings::default() };
        own(Some("root:root"), privileged).check_program(&spec("a"), "0", true).unwrap();
        // Who cannot be told is nobody.
        let unknown = own(None, Settings::default());
        unknown.check_program(&spec("a"), "", false).unwrap_err();
        unknown.check_files(&spec("a")).unwrap_err();
    }

    #[test]
    fn a_container_in_the_cells_own_guest_has_no_more_than_the_cell() {
        let words = |all: &[&str]| all.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let bare = Settings { cap_drop: words(&["CAP_CHOWN"]), ..Settings::default() };
        let bare = Settings { no_new_privileges: true, cap_add: words(&["net_raw"]), ..bare };
        let cell = own(Some("0"), bare);
        let bound = |settings: Settings| {
            let mut wish = CellSpec { settings, ..spec("a") };
            cell.bound(&mut wish, "0").map(|()| wish.settings)
        };
        let cut = bound(Settings { cap_add: words(&["CAP_NET_RAW"]), ..Settings::default() });
        let cut = cut.unwrap();
        assert!(cut.no_new_privileges && cut.cap_drop == ["CAP_CHOWN"], "{cut:?}");
        for more in [
            Settings { privileged: true, ..Settings::default() },
            Settings { cap_add: words(&["SYS_ADMIN"]), ..Settings::default() },
            Settings { cap_add: words(&["ALL"]), ..Settings::default() },
            Settings { masked_paths: Some(Vec::new()), ..Settings::default() },
            Settings { device_rules: words(&["a *:* rwm"]), ..Settings::default() },
        ] {
            bound(more.clone()).expect_err(&format!("{more:?}"));
        }
        let mut other = CellSpec { settings: Settings::default(), ..spec("b") };
        other.settings.privileged = true;
        cell.bound(&mut other, "0").unwrap();
        assert!(!other.settings.no_new_privileges);
    }
}
