//! The result of a gate call, as an integer.

/// Status codes; zero is success, failures are negative.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The table has no free slot.
    Full = -1,
    /// The handle names nothing: never given out, or revoked.
    NotPresent = -2,
    /// The handle names a capability of another kind.
    WrongKind = -3,
    /// The capability does not cover the request.
    Denied = -4,
    /// The call itself is malformed.
    Invalid = -5,
}

impl Status {
    /// Every status, from success on.
    pub const ALL: &'static [(Status, &'static str)] = &[
        (Status::Ok, "OK"),
        (Status::Full, "FULL"),
        (Status::NotPresent, "NOT_PRESENT"),
        (Status::WrongKind, "WRONG_KIND"),
        (Status::Denied, "DENIED"),
        (Status::Invalid, "INVALID"),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_success_is_not_negative() {
        assert_eq!(size_of::<Status>(), 4);
        for (index, (status, _)) in Status::ALL.iter().enumerate() {
            assert_eq!(*status as i32, -(index as i32));
        }
    }
}
