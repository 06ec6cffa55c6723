//! What a guest kernel's Pager and its host say to each other, in messages of a
//! sequenced packet socket (`arch/um/include/shared/pager_abi.h` of the patched
//! kernel).

/// Bytes of each message: kind, 0, pages; in the machine's byte order.
pub const MESSAGE_BYTES: usize = 16;

const ASK: u32 = 1;
const GIVE: u32 = 2;
const GRANT: u32 = 3;

/// Bytes of a page, the unit of credit.
pub const PAGE_BYTES: u64 = 4096;

/// What a guest kernel says; nothing of it is believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Wants so many pages of credit at most, and waits for a [`grant`].
    Ask(u64),
    /// Has no use for so many pages of its credit.
    Give(u64),
}

impl Request {
    /// `None`: no message of the protocol.
    pub fn parse(message: &[u8]) -> Option<Self> {
        let (kind, rest) = message.split_first_chunk()?;
        let (reserved, pages) = rest.split_first_chunk::<4>()?;
        let pages = u64::from_ne_bytes(pages.try_into().ok()?);
        match (u32::from_ne_bytes(*kind), reserved) {
            (ASK, [0, 0, 0, 0]) => Some(Self::Ask(pages)),
            (GIVE, [0, 0, 0, 0]) => Some(Self::Give(pages)),
            _ => None,
        }
    }
}

/// The answer to [`Request::Ask`].
pub fn grant(pages: u64) -> [u8; MESSAGE_BYTES] {
    let mut message = [0; MESSAGE_BYTES];
    message[..4].copy_from_slice(&GRANT.to_ne_bytes());
    message[8..].copy_from_slice(&pages.to_ne_bytes());
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATCH: &str = include_str!(
        "../../guest-kernel-patches/0305-mm-bind-pages-within-a-credit-of-the-host-s.patch"
    );

    fn message(kind: u32, reserved: u32, pages: u64) -> Vec<u8> {
        let words = [kind.to_ne_bytes(), reserved.to_ne_bytes()].concat();
        [words, pages.to_ne_bytes().to_vec()].concat()
    }

    #[test]
    fn requests_are_read_and_anything_else_refused() {
        assert_eq!(Request::parse(&message(ASK, 0, 7)), Some(Request::Ask(7)));
        assert_eq!(Request::parse(&message(GIVE, 0, u64::MAX)), Some(Request::Give(u64::MAX)));
        assert_eq!(grant(5).to_vec(), message(GRANT, 0, 5));
        for wrong in [message(GRANT, 0, 1), message(ASK, 1, 1), message(0, 0, 0)] {
            assert_eq!(Request::parse(&wrong), None);
        }
        let whole = message(ASK, 0, 7);
        for length in 0..whole.len() {
            assert_eq!(Request::parse(&whole[..length]), None);
        }
        assert_eq!(Request::parse(&[whole, vec![0]].concat()), None);
    }

    #[test]
    fn the_guest_kernels_header_says_the_same() {
        for (name, value) in [("ASK", ASK), ("GIVE", GIVE), ("GRANT", GRANT)] {
            assert!(PATCH.contains(&format!("+#define PAGER_{name}\t{value}\t")), "{name}");
        }
        assert!(
            PATCH.contains(
                "+struct pager_message {\n+\tunsigned int kind;\n+\tunsigned int reserved;"
            )
        );
    }
}
