//! How deep the types of a component are nested, counted without recursion: the parser and the
//! engine read them recursively, and a file of a few megabytes can nest a million of them.

use wasmparser::{
    BinaryReader, BinaryReaderError, ComponentAlias, ComponentExternName, ComponentType,
    ComponentTypeRef, CoreType,
};

type Read<T> = Result<T, BinaryReaderError>;

/// First byte of a component's type, which holds declarations of its own.
const COMPONENT: u8 = 0x41;
/// First byte of an instance's type, which does too.
const INSTANCE: u8 = 0x42;

/// Declarations, by their first byte.
const CORE_TYPE: u8 = 0x00;
const TYPE: u8 = 0x01;
const ALIAS: u8 = 0x02;
const IMPORT: u8 = 0x03;

/// Whether types in a section, given from its count on, are nested deeper than `depth_max`.
///
/// # Errors
/// Those of a section that is malformed.
pub(super) fn is_deeper(section: &[u8], depth_max: usize) -> Read<bool> {
    let mut reader = BinaryReader::new(section, 0);
    // What is left to read on each level; the section itself holds types only.
    let mut left = vec![reader.read_var_u32()?];
    while let Some(count) = left.last_mut() {
        let Some(less) = count.checked_sub(1) else {
            left.pop();
            continue;
        };
        *count = less;
        let is_type = left.len() == 1 || declares_type(&mut reader)?;
        if is_type && let Some(inner) = open(&mut reader)? {
            left.push(inner);
            if left.len() > depth_max {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Reads a declaration, or of a type's only its first byte.
fn declares_type(reader: &mut BinaryReader<'_>) -> Read<bool> {
    match reader.read_u8()? {
        TYPE => return Ok(true),
        CORE_TYPE => {
            reader.read::<CoreType<'_>>()?;
        }
        ALIAS => {
            reader.read::<ComponentAlias<'_>>()?;
        }
        // Imports and exports: a name and what it is. Others are refused by the validator.
        IMPORT.. => {
            reader.read::<ComponentExternName<'_>>()?;
            reader.read::<ComponentTypeRef>()?;
        }
    }
    Ok(false)
}

/// The number of declarations in the type that comes, if it is one with declarations; else the
/// type is read.
fn open(reader: &mut BinaryReader<'_>) -> Read<Option<u32>> {
    let mut ahead = reader.clone();
    if let COMPONENT | INSTANCE = ahead.read_u8()? {
        *reader = ahead;
        return Ok(Some(reader.read_var_u32()?));
    }
    reader.read::<ComponentType<'_>>()?;
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use wasmparser::{Parser, Payload};

    fn section(text: &str) -> Vec<u8> {
        let binary = wat::parse_str(text).unwrap();
        let payloads = Parser::new(0).parse_all(&binary).map(Result::unwrap);
        let range = payloads.into_iter().find_map(|payload| match payload {
            Payload::ComponentTypeSection(section) => Some(section.range()),
            _ => None,
        });
        binary[range.unwrap()].to_vec()
    }

    #[test]
    fn depth_is_that_of_the_text() {
        let text = r#"(component
          (type (list u8))
          (type (component
            (core type (func))
            (import "a" (func (param "x" u32)))
            (type (instance
              (type $r (record (field "f" u8)))
              (export "r" (type (eq $r)))
              (alias outer 1 0 (type))))
            (export "b" (instance (type 1))))))"#;
        let section = section(text);
        assert!(!is_deeper(&section, 3).unwrap());
        assert!(is_deeper(&section, 2).unwrap());
    }

    #[test]
    fn a_million_levels_take_no_stack() {
        let mut section = vec![1];
        for _ in 0..1_000_000 {
            section.extend([COMPONENT, 1, TYPE]);
        }
        assert!(is_deeper(&section, 100).unwrap());
        assert!(is_deeper(&section, usize::MAX).is_err(), "it ends in the middle of a type");
    }
}
