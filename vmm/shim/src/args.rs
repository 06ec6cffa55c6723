//! The command line by which containerd executes a shim: Go's flags, then a word.

use std::path::PathBuf;

use crate::error::{Result, ShimError};

/// What the shim is executed for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Action {
    Version,
    /// Say what the runtime can do.
    Info,
    #[default]
    Start,
    /// Remove what a shim that was killed has left.
    Delete,
    /// By the shim itself: serve the task service on standard input, a listening socket.
    Serve,
    /// By the shim itself: make a cell of the spec on standard input, its session.
    Launch,
}

/// The flags of containerd's `pkg/shim`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args {
    pub action: Action,
    pub debug: bool,
    pub namespace: String,
    pub id: String,
    /// containerd's own socket.
    pub address: String,
    /// The folder with `config.json`; the working directory where it is empty.
    pub bundle: PathBuf,
}

impl Args {
    /// # Errors
    /// Names the word that is not known.
    pub fn read(words: &[String]) -> Result<Self> {
        let mut args = Self::default();
        let (mut action, mut asks) = (None, None);
        let mut left = words.iter();
        while let Some(word) = left.next() {
            let Some(flag) = word.strip_prefix('-') else {
                action = action.or(Some(word.as_str()));
                continue;
            };
            let flag = flag.strip_prefix('-').unwrap_or(flag);
            let (name, own) = match flag.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (flag, None),
            };
            let is_on = own.as_deref().is_none_or(|value| value == "true" || value == "1");
            match name {
                "debug" => args.debug = is_on,
                "v" | "version" if is_on => asks = Some(Action::Version),
                "info" if is_on => asks = Some(Action::Info),
                "v" | "version" | "info" => {}
                "namespace" | "id" | "address" | "bundle" | "publish-binary" => {
                    let value = own.or_else(|| left.next().cloned());
                    let value = value.ok_or_else(|| {
                        ShimError::invalid(format!("the flag -{name} has no value"))
                    })?;
                    match name {
                        "namespace" => args.namespace = value,
                        "id" => args.id = value,
                        "address" => args.address = value,
                        "bundle" => args.bundle = value.into(),
                        // Events go to containerd's socket.
                        _ => {}
                    }
                }
                _ => return Err(ShimError::invalid(format!("the flag -{name} is not known"))),
            }
        }
        args.action = match (asks, action) {
            (Some(asks), _) => asks,
            (None, Some("start")) => Action::Start,
            (None, Some("delete")) => Action::Delete,
            (None, Some("serve")) => Action::Serve,
            (None, Some("launch")) => Action::Launch,
            (None, Some(other)) => {
                return Err(ShimError::invalid(format!("{other:?} is no action of a shim")));
            }
            (None, None) => {
                return Err(ShimError::invalid(
                    "containerd executes this program (docs: Under containerd); give start or delete",
                ));
            }
        };
        let names = matches!(args.action, Action::Start | Action::Delete | Action::Serve);
        if names && !(is_id(&args.namespace) && is_id(&args.id)) {
            return Err(ShimError::invalid(
                "give -namespace and -id, of letters, digits, . _ and -",
            ));
        }
        Ok(args)
    }

    /// The folder with `config.json`.
    ///
    /// # Errors
    /// The working directory is gone.
    pub fn bundle(&self) -> Result<PathBuf> {
        match self.bundle.as_os_str().is_empty() {
            false => Ok(self.bundle.clone()),
            true => std::env::current_dir().map_err(ShimError::host("cannot find the bundle")),
        }
    }
}

/// Whether containerd calls a container or a namespace so (`pkg/identifiers`).
pub fn is_id(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.len() <= 76
        && text.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Args> {
        Args::read(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn flags_are_read_as_go_reads_them() {
        let args = read("-namespace default -address=/run/c.sock --id a.1 -debug start").unwrap();
        assert_eq!((args.namespace.as_str(), args.id.as_str()), ("default", "a.1"));
        assert!(args.debug && args.action == Action::Start && args.address == "/run/c.sock");
        let args = read("-namespace n -id i -publish-binary /c -bundle /b delete").unwrap();
        assert_eq!((args.action, args.bundle), (Action::Delete, PathBuf::from("/b")));
        assert_eq!(read("-v").unwrap().action, Action::Version);
        assert_eq!(read("-info").unwrap().action, Action::Info);
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        let refused = |text: &str| read(text).unwrap_err().to_string();
        assert!(refused("-what start").contains("-what"));
        assert!(refused("-id").contains("-id"));
        assert!(refused("-namespace n -id i stop").contains("stop"));
        assert!(refused("-namespace n -id ../x start").contains("-id"));
        assert!(refused("start").contains("-namespace"));
    }
}
