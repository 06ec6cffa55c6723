//! Restart policies: whether a cell starts again by itself when its program has ended. The rules
//! and the words are docker's.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Whether a cell starts again by itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    #[default]
    No,
    /// When its program failed, at most so often; 0 is without end.
    OnFailure(u32),
    Always,
    UnlessStopped,
}

impl Policy {
    pub fn is_no(&self) -> bool {
        *self == Self::No
    }

    /// As docker calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::OnFailure(_) => "on-failure",
            Self::Always => "always",
            Self::UnlessStopped => "unless-stopped",
        }
    }

    /// How often a failed program is started again; 0 is without end.
    pub fn retries(self) -> u32 {
        match self {
            Self::OnFailure(most) => most,
            _ => 0,
        }
    }

    /// # Errors
    /// In docker's words, what is no policy.
    pub fn of(name: &str, retries: i64) -> Result<Self, String> {
        let most = u32::try_from(retries)
            .map_err(|_| "invalid restart policy: maximum retry count cannot be negative")?;
        let policy = match name {
            "" | "no" => Self::No,
            "on-failure" => Self::OnFailure(most),
            "always" => Self::Always,
            "unless-stopped" => Self::UnlessStopped,
            _ => {
                return Err(format!(
                    "invalid restart policy: unknown policy '{name}'; use one of 'no', 'always', \
                     'on-failure', or 'unless-stopped'"
                ));
            }
        };
        match policy.retries() == most {
            true => Ok(policy),
            false => Err("invalid restart policy: maximum retry count can only be used with \
                          'on-failure'"
                .to_owned()),
        }
    }

    /// Whether a program is wanted again that ended with `exit_code` and was started so often by
    /// its policy.
    pub fn wants(self, exit_code: u8, restarts: u32) -> bool {
        match self {
            Self::No => false,
            Self::Always | Self::UnlessStopped => true,
            Self::OnFailure(most) => exit_code != 0 && (most == 0 || restarts < most),
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    /// `on-failure:3` and the others' names.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, retries) = match text.split_once(':') {
            None => (text, 0),
            Some((name, digits)) => {
                let wrong = || {
                    format!(
                        "invalid restart policy: the maximum retry count {digits:?} is no number"
                    )
                };
                (name, digits.parse().map_err(|_| wrong())?)
            }
        };
        Self::of(name, retries)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OnFailure(most @ 1..) => write!(f, "on-failure:{most}"),
            other => f.write_str(other.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_as_docker_reads_them() {
        let read = |text: &str| text.parse::<Policy>();
        assert_eq!(read("no"), Ok(Policy::No));
        assert_eq!(read("on-failure"), Ok(Policy::OnFailure(0)));
        assert_eq!(read("on-failure:3"), Ok(Policy::OnFailure(3)));
        assert_eq!(read("always"), Ok(Policy::Always));
        assert_eq!(read("unless-stopped"), Ok(Policy::UnlessStopped));
        for policy in ["no", "on-failure", "on-failure:3", "always", "unless-stopped"] {
            assert_eq!(read(policy).unwrap().to_string(), policy);
        }
        for (text, word) in [
            ("sometimes", "unknown policy 'sometimes'"),
            ("always:3", "can only be used with"),
            ("on-failure:x", "no number"),
            ("on-failure:-1", "negative"),
        ] {
            assert!(read(text).unwrap_err().contains(word), "{text}");
        }
    }

    #[test]
    fn a_failed_program_is_wanted_again_so_often() {
        assert!(!Policy::No.wants(1, 0));
        assert!(Policy::Always.wants(0, 9) && Policy::UnlessStopped.wants(0, 9));
        let most = Policy::OnFailure(2);
        assert!(most.wants(1, 1) && !most.wants(1, 2) && !most.wants(0, 0));
        assert!(Policy::OnFailure(0).wants(1, 1000));
    }
}
