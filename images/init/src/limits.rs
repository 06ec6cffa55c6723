//! Limits of a process by the names that a specification has for them (setrlimit(2)).

use exocell_agent::oci::Rlimit;

use crate::error::InitError;

/// In the order of their numbers, without `RLIMIT_`.
const NAMES: [&str; 16] = [
    "CPU",
    "FSIZE",
    "DATA",
    "STACK",
    "CORE",
    "RSS",
    "NPROC",
    "NOFILE",
    "MEMLOCK",
    "AS",
    "LOCKS",
    "SIGPENDING",
    "MSGQUEUE",
    "NICE",
    "RTPRIO",
    "RTTIME",
];

/// A limit, as the kernel takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    pub number: u32,
    pub soft: u64,
    pub hard: u64,
}

/// # Errors
/// A name that no limit has.
pub fn read(limit: &Rlimit) -> Result<Limit, InitError> {
    let plain = limit.kind.strip_prefix("RLIMIT_").unwrap_or(&limit.kind);
    let at = NAMES.iter().position(|name| *name == plain);
    let unknown = || InitError::invalid(format!("no limit {}; see setrlimit(2)", limit.kind));
    let number = u32::try_from(at.ok_or_else(unknown)?).map_err(|_| unknown())?;
    Ok(Limit { number, soft: limit.soft, hard: limit.hard })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_numbers_of_the_kernel() {
        let limit = |kind: &str| read(&Rlimit { kind: kind.to_owned(), soft: 1, hard: 2 });
        let nofile = limit("RLIMIT_NOFILE").unwrap();
        assert_eq!((nofile.number, nofile.soft, nofile.hard), (libc::RLIMIT_NOFILE, 1, 2));
        assert_eq!(limit("RLIMIT_RTTIME").unwrap().number, libc::RLIMIT_RTTIME);
        assert!(limit("RLIMIT_FILES").is_err());
    }
}
