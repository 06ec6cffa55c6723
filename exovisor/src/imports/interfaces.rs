//! What a component may import, interface by interface, and what each needs.
//!
//! Names are those of WASI 0.2 (`wasi:cli/imports`). A component is not refused for an interface
//! whose capability it was not granted: languages import all of them, whatever a program uses.
//! Its calls fail instead.

use super::{Effect, Import, Item, Tier};
use exocell_xgate::Kind;

const NOTHING: &[Kind] = &[];
const STDIO: &[Kind] = &[Kind::Stdio];
const CLOCK: &[Kind] = &[Kind::Clock];
const RANDOM: &[Kind] = &[Kind::Random];
const FILES: &[Kind] = &[Kind::Folder];
const SOCKETS: &[Kind] = &[Kind::Network];

const fn interface(
    module: &'static str,
    name: &'static str,
    effect: Effect,
    needs: &'static [Kind],
) -> Import {
    let (item, tier) = (Item::Interface, Tier::Wasi);
    Import { module, name, item, tier, effect, needs, descriptors: &[] }
}

/// One that reaches files or peers.
const fn gated(
    module: &'static str,
    name: &'static str,
    effect: Effect,
    needs: &'static [Kind],
) -> Import {
    Import { tier: Tier::Gated, ..interface(module, name, effect, needs) }
}

use Effect::{Crossing, Pure, Read, Write};

pub(crate) static INTERFACES: &[Import] = &[
    interface("wasi:cli", "environment", Pure, NOTHING),
    interface("wasi:cli", "exit", Pure, NOTHING),
    interface("wasi:cli", "stdin", Read, STDIO),
    interface("wasi:cli", "stdout", Write, STDIO),
    interface("wasi:cli", "stderr", Write, STDIO),
    interface("wasi:cli", "terminal-input", Pure, NOTHING),
    interface("wasi:cli", "terminal-output", Pure, NOTHING),
    interface("wasi:cli", "terminal-stdin", Read, STDIO),
    interface("wasi:cli", "terminal-stdout", Read, STDIO),
    interface("wasi:cli", "terminal-stderr", Read, STDIO),
    // What is waited for and streamed was opened by another interface.
    interface("wasi:io", "error", Pure, NOTHING),
    interface("wasi:io", "poll", Pure, NOTHING),
    interface("wasi:io", "streams", Pure, NOTHING),
    interface("wasi:clocks", "monotonic-clock", Read, CLOCK),
    interface("wasi:clocks", "wall-clock", Read, CLOCK),
    interface("wasi:random", "random", Read, RANDOM),
    interface("wasi:random", "insecure", Read, RANDOM),
    interface("wasi:random", "insecure-seed", Read, RANDOM),
    gated("wasi:filesystem", "types", Write, FILES),
    gated("wasi:filesystem", "preopens", Read, FILES),
    gated("wasi:sockets", "network", Pure, SOCKETS),
    gated("wasi:sockets", "instance-network", Pure, SOCKETS),
    gated("wasi:sockets", "ip-name-lookup", Crossing, SOCKETS),
    gated("wasi:sockets", "tcp", Crossing, SOCKETS),
    gated("wasi:sockets", "tcp-create-socket", Pure, SOCKETS),
    gated("wasi:sockets", "udp", Crossing, SOCKETS),
    gated("wasi:sockets", "udp-create-socket", Pure, SOCKETS),
];

/// The entry for `wasi:PACKAGE/INTERFACE@0.2.N`; releases of 0.2 only add to one another.
pub(crate) fn find(name: &str) -> Option<&'static Import> {
    let (path, version) = name.split_once('@')?;
    let patch = version.strip_prefix("0.2.")?;
    if patch.is_empty() || !patch.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let (module, name) = path.split_once('/')?;
    INTERFACES.iter().find(|import| import.module == module && import.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_0_2_are_known_and_no_others() {
        for known in ["wasi:cli/stdout@0.2.0", "wasi:cli/stdout@0.2.12", "wasi:io/poll@0.2.6"] {
            assert!(find(known).is_some(), "{known}");
        }
        for unknown in [
            "wasi:cli/stdout",
            "wasi:cli/stdout@0.3.0",
            "wasi:cli/stdout@0.2.",
            "wasi:cli/stdout@0.2.0-rc-2023-11-10",
            "wasi:cli/nothing@0.2.0",
            "wasi:http/types@0.2.0",
            "stdout",
        ] {
            assert!(find(unknown).is_none(), "{unknown}");
        }
    }

    #[test]
    fn what_reaches_files_or_peers_needs_something() {
        for import in INTERFACES {
            assert!(import.tier != Tier::Gated || !import.needs.is_empty(), "{}", import.name);
        }
    }
}
