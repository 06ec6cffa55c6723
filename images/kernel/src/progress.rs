//! What a build tells its caller while it runs.

use std::fmt;

/// A step of the build, in the order in which they run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Another builder holds the lock.
    Wait,
    /// The source tarball is found or downloaded, and checked.
    Fetch,
    /// The tarball is unpacked.
    Unpack,
    /// The series is applied.
    Patch,
    /// The config fragments are merged and checked.
    Configure,
    /// The kernel is compiled and linked.
    Compile,
    /// The kernel is stripped and put into the cache.
    Install,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wait => "wait for another kernel build",
            Self::Fetch => "fetch source",
            Self::Unpack => "unpack",
            Self::Patch => "patch",
            Self::Configure => "configure",
            Self::Compile => "compile",
            Self::Install => "install",
        })
    }
}

/// Where a build stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// The step that runs now.
    pub step: Step,
    /// How much of the step is done, from 0 to 1, where that is known.
    pub fraction: Option<f32>,
}
