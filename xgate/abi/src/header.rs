//! The C form of this crate's numbers.

use crate::{ABI_VERSION, Handle, Kind, Rights, Status};
use core::fmt::{Result, Write};

/// Writes the header `exocell_abi.h`.
///
/// # Errors
/// Only those of `out`.
pub fn write_c_header(out: &mut dyn Write) -> Result {
    out.write_str(OPENING)?;
    writeln!(out, "#define EXOCELL_ABI_VERSION {ABI_VERSION}u\n")?;
    write_handle(out)?;
    for kind in Kind::ALL {
        define(out, "EXOCELL_KIND_", kind.name())?;
        writeln!(out, " {}u", *kind as u32)?;
    }
    out.write_str("\n")?;
    for (name, right) in Rights::all().iter_names() {
        define(out, "EXOCELL_RIGHT_", name)?;
        writeln!(out, " {:#x}u", right.bits())?;
    }
    out.write_str("\n")?;
    for (status, name) in Status::ALL {
        define(out, "EXOCELL_STATUS_", name)?;
        writeln!(out, " ({})", *status as i32)?;
    }
    out.write_str("\n#endif\n")
}

const OPENING: &str = "\
/* SPDX-License-Identifier: Apache-2.0 */
/* Written by exocell-xgate-abi; its test `header_is_current` keeps it equal. */
#ifndef EXOCELL_ABI_H
#define EXOCELL_ABI_H

";

fn write_handle(out: &mut dyn Write) -> Result {
    let shift = Handle::GENERATION_SHIFT;
    writeln!(out, "/* A handle is 64 bits: slot below, generation above. */")?;
    writeln!(out, "#define EXOCELL_HANDLE_NULL 0ull")?;
    writeln!(out, "#define EXOCELL_HANDLE_GENERATION_SHIFT {shift}\n")
}

fn define(out: &mut dyn Write, prefix: &str, name: &str) -> Result {
    write!(out, "#define {prefix}")?;
    name.chars().try_for_each(|letter| out.write_char(letter.to_ascii_uppercase()))
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::string::String;

    #[test]
    fn header_is_current() {
        let mut text = String::new();
        write_c_header(&mut text).expect("a string takes everything");
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/include/exocell_abi.h");
        if std::env::var_os("EXOCELL_WRITE_HEADER").is_some() {
            std::fs::write(path, &text).expect("the header can be written");
        }
        let kept = std::fs::read_to_string(path).expect("the header is checked in");
        assert_eq!(kept, text, "run the test again with EXOCELL_WRITE_HEADER=1");
    }
}
