//! Reading and writing what a module's arguments point to, which may lie anywhere.

use wasmtime_wasi::p1::types::Errno;
use wiggle::{GuestError, GuestMemory, GuestPtr, GuestType};

/// Buffers of one call.
const BUFFERS_MAX: u32 = 1024;

/// Addresses, lengths and descriptors are 32 bits that came as a signed number.
pub(crate) fn number(argument: i64) -> u32 {
    argument as u32
}

pub(crate) fn fault(error: GuestError) -> Errno {
    match error {
        GuestError::InvalidUtf8(_) => Errno::Ilseq,
        _ => Errno::Fault,
    }
}

/// # Errors
/// `ENAMETOOLONG` beyond `len_max` bytes, `EILSEQ` where it is not UTF-8.
pub(crate) fn text(
    memory: &GuestMemory<'_>,
    start: u32,
    len: u32,
    len_max: usize,
) -> Result<String, Errno> {
    if len as usize > len_max {
        return Err(Errno::Nametoolong);
    }
    let text = GuestPtr::<str>::new((start, len));
    Ok(memory.as_cow_str(text).map_err(fault)?.into_owned())
}

pub(crate) fn get<T: for<'a> GuestType>(memory: &GuestMemory<'_>, at: u32) -> Result<T, Errno> {
    memory.read(GuestPtr::new(at)).map_err(fault)
}

pub(crate) fn put<T: GuestType>(
    memory: &mut GuestMemory<'_>,
    at: i64,
    value: T,
) -> Result<(), Errno> {
    memory.write(GuestPtr::new(number(at)), value).map_err(fault)
}

pub(crate) fn bytes(memory: &GuestMemory<'_>, start: u32, len: u32) -> Result<Vec<u8>, Errno> {
    memory.to_vec(GuestPtr::<[u8]>::new((start, len))).map_err(fault)
}

pub(crate) fn copy_out(
    memory: &mut GuestMemory<'_>,
    start: u32,
    bytes: &[u8],
) -> Result<(), Errno> {
    let to = GuestPtr::<[u8]>::new((start, bytes.len() as u32));
    memory.copy_from_slice(bytes, to).map_err(fault)
}

/// Starts and lengths of buffers, which are not looked at yet.
pub(crate) fn buffers(
    memory: &GuestMemory<'_>,
    start: u32,
    count: u32,
) -> Result<Vec<(u32, u32)>, Errno> {
    if count > BUFFERS_MAX {
        return Err(Errno::Inval);
    }
    let words = count.checked_mul(2).ok_or(Errno::Inval)?;
    let words: Vec<u32> = memory.to_vec(GuestPtr::<[u32]>::new((start, words))).map_err(fault)?;
    Ok(words.as_chunks::<2>().0.iter().map(|[start, len]| (*start, *len)).collect())
}

/// What the module has in `buffers`, at most `len_max` bytes of it.
pub(crate) fn gather(
    memory: &GuestMemory<'_>,
    buffers: Vec<(u32, u32)>,
    len_max: usize,
) -> Result<Vec<u8>, Errno> {
    let mut all = Vec::new();
    for (start, len) in buffers {
        let len = (len as usize).min(len_max - all.len());
        let part = GuestPtr::<[u8]>::new((start, len as u32));
        all.extend_from_slice(&memory.as_cow(part).map_err(fault)?);
    }
    Ok(all)
}

/// Puts `bytes` into `buffers`, which have room for them.
pub(crate) fn scatter(
    memory: &mut GuestMemory<'_>,
    buffers: Vec<(u32, u32)>,
    bytes: &[u8],
) -> Result<(), Errno> {
    let mut rest = bytes;
    for (start, len) in buffers {
        let (part, behind) = rest.split_at(rest.len().min(len as usize));
        copy_out(memory, start, part)?;
        rest = behind;
    }
    Ok(())
}
