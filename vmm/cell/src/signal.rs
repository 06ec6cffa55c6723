//! Signals that programs are sent, by their names and numbers.

use std::fmt;
use std::str::FromStr;

use crate::CellError;

/// The first and the last real-time signal that programs have: those below belong to their C
/// library (signal(7)).
const RT_MIN: u8 = 34;
const RT_MAX: u8 = 64;

/// One of signal(7): 1 to 64, the real-time ones too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal(u8);

impl Signal {
    pub const KILL: Self = Self(libc::SIGKILL as u8);
    pub const TERM: Self = Self(libc::SIGTERM as u8);

    pub fn number(self) -> u8 {
        self.0
    }

    fn of_number(text: &str) -> Option<Self> {
        text.parse().ok().filter(|number| (1..=RT_MAX).contains(number)).map(Self)
    }

    /// `RTMIN`, `RTMIN+3`, `RTMAX-2`.
    fn real_time(name: &str) -> Option<Self> {
        let (end, rest) = name.strip_prefix("RT")?.split_at_checked(3)?;
        let by = |sign| match rest {
            "" => Some(0),
            rest => rest.strip_prefix(sign)?.parse::<u8>().ok(),
        };
        let number = match end {
            "MIN" => RT_MIN.checked_add(by('+')?),
            "MAX" => RT_MAX.checked_sub(by('-')?),
            _ => None,
        };
        number.filter(|number| (RT_MIN..=RT_MAX).contains(number)).map(Self)
    }
}

impl FromStr for Signal {
    type Err = CellError;

    /// `KILL`, `SIGKILL`, `9` or `SIGRTMIN+3`, in whatever case.
    fn from_str(text: &str) -> Result<Self, CellError> {
        let upper = text.to_ascii_uppercase();
        let name = upper.strip_prefix("SIG").unwrap_or(&upper);
        let named = || nix::sys::signal::Signal::from_str(&format!("SIG{name}")).ok();
        Self::of_number(text)
            .or_else(|| named().map(|signal| Self(signal as u8)))
            .or_else(|| Self::real_time(name))
            .ok_or_else(|| {
                let what = "is no signal; try TERM, KILL, HUP, RTMIN+3 or a number from 1 to 64";
                CellError::Usage(format!("{text} {what}"))
            })
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match nix::sys::signal::Signal::try_from(i32::from(self.0)) {
            Ok(known) => to.write_str(known.as_str()),
            Err(_) => write!(to, "signal {}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_numbers() {
        let number = |text: &str| text.parse::<Signal>().ok().map(Signal::number);
        for (text, wanted) in [
            ("TERM", 15),
            ("sigkill", 9),
            ("10", 10),
            ("37", 37),
            ("SIGRTMIN", 34),
            ("SIGRTMIN+3", 37),
            ("rtmax-1", 63),
            ("RTMAX", 64),
        ] {
            assert_eq!(number(text), Some(wanted), "{text}");
        }
        for text in ["", "SIG", "0", "65", "-1", "FOO", "RT", "RTMIN+31", "RTMIN-1", "RTMAX+1"] {
            assert_eq!(number(text), None, "{text}");
        }
        assert_eq!(number("RTMIN+é"), None);
    }
}
