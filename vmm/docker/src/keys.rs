//! The keys that end a session and leave its program running: docker's `--detach-keys`.

use std::str::FromStr;

/// What is pressed where nobody says.
pub const DEFAULT: &str = "ctrl-p,ctrl-q";

/// Keys one after the other, and how many of them have been pressed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    sequence: Vec<u8>,
    pressed: usize,
}

impl Default for Keys {
    fn default() -> Self {
        Self { sequence: vec![0x10, 0x11], pressed: 0 }
    }
}

impl FromStr for Keys {
    type Err = String;

    /// Reads `ctrl-p,ctrl-q` or `x`; nothing at all for no keys.
    fn from_str(text: &str) -> Result<Self, String> {
        let keys = text.split(',').filter(|_| !text.is_empty()).map(|key| {
            byte(key).ok_or_else(|| {
                format!("`{key}` is no key; write letters and ctrl-LETTER with commas between")
            })
        });
        Ok(Self { sequence: keys.collect::<Result<_, _>>()?, pressed: 0 })
    }
}

fn byte(key: &str) -> Option<u8> {
    match (key.strip_prefix("ctrl-"), key.as_bytes()) {
        (Some(name), _) => match name.as_bytes() {
            [letter @ (b'a'..=b'z' | b'A'..=b'Z' | b'@' | b'['..=b'_')] => Some(letter & 0x1f),
            _ => None,
        },
        (None, [letter]) => Some(*letter),
        (None, _) => None,
    }
}

impl Keys {
    /// What of `typed` goes on to the program, and whether the keys were pressed. The first of them
    /// waits for the next to be told from what is meant for the program.
    pub fn pass(&mut self, typed: &[u8]) -> (Vec<u8>, bool) {
        let mut passed = Vec::with_capacity(typed.len());
        for byte in typed {
            if self.sequence.get(self.pressed) != Some(byte) {
                passed.extend(&self.sequence[..self.pressed]);
                self.pressed = 0;
            }
            if self.sequence.get(self.pressed) != Some(byte) {
                passed.push(*byte);
                continue;
            }
            self.pressed += 1;
            if self.pressed == self.sequence.len() {
                return (passed, true);
            }
        }
        (passed, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read() {
        let sequence = |text: &str| text.parse::<Keys>().map(|keys| keys.sequence);
        assert_eq!(DEFAULT.parse::<Keys>(), Ok(Keys::default()));
        assert_eq!(sequence("ctrl-[,x"), Ok(vec![27, b'x']));
        assert_eq!(sequence(""), Ok(vec![]));
        for bad in ["ctrl-", "ctrl-1", "xy", ",", "alt-x"] {
            assert!(sequence(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_not_all_of_the_keys_goes_on() {
        let mut keys: Keys = DEFAULT.parse().unwrap();
        assert_eq!(keys.pass(b"a\x10"), (b"a".to_vec(), false));
        assert_eq!(keys.pass(b"b\x10\x10"), (b"\x10b\x10".to_vec(), false));
        assert_eq!(keys.pass(b"\x11left"), (Vec::new(), true));
        let mut none: Keys = "".parse().unwrap();
        assert_eq!(none.pass(b"\x10\x11"), (b"\x10\x11".to_vec(), false));
    }
}
