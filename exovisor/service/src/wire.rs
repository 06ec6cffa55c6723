//! What goes between the process that listens and a worker: frames of a length and so many bytes.
//!
//! ```text
//! request: number u64, module u32, kind u8, count of texts u32, each a length u32 and its bytes,
//!          then the body
//! answer:  number u64, status u16, content u8, ending u8, CPU ns u64, preemptions u64, then the body
//! ```
//! Numbers are little-endian. What a worker sends is an allegation: its length is held against a
//! bound before there is room for it, and an answer is nobody's unless its number is waited for.

use crate::call::{Done, Ending, Spent, Work};
use crate::http::Answer;

/// Of a frame's length.
const LENGTH_BYTES: usize = 4;
/// Longest request: more than any head and body that are taken.
pub(crate) const REQUEST_BYTES_MAX: usize = 16 << 20;
/// What is read at once.
const PIECE_BYTES: usize = 64 << 10;

/// The other side does not keep to the protocol.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("it broke the protocol")]
pub(crate) struct Broken;

/// Bytes as they come, cut into frames.
#[derive(Default)]
pub(crate) struct Frames {
    bytes: Vec<u8>,
    /// From where on to where there is something that was not given out.
    begins: usize,
    ends: usize,
}

impl Frames {
    /// Where more is to be put; [`Frames::came`] says how much was.
    pub fn room(&mut self) -> &mut [u8] {
        self.bytes.copy_within(self.begins..self.ends, 0);
        (self.begins, self.ends) = (0, self.ends - self.begins);
        if self.bytes.len() < self.ends + PIECE_BYTES {
            self.bytes.resize((2 * self.ends).max(self.ends + PIECE_BYTES), 0);
        }
        self.bytes.get_mut(self.ends..).unwrap_or_default()
    }

    /// So many bytes were put into the room.
    pub fn came(&mut self, count: usize) {
        self.ends = (self.ends + count).min(self.bytes.len());
    }

    /// The next frame, if it is whole.
    ///
    /// # Errors
    /// [`Broken`] if it is longer than `bytes_max`.
    pub fn next(&mut self, bytes_max: usize) -> Result<Option<&[u8]>, Broken> {
        let rest = self.bytes.get(self.begins..self.ends).unwrap_or_default();
        let Some((length, rest)) = rest.split_first_chunk::<LENGTH_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > bytes_max {
            return Err(Broken);
        }
        let Some(frame) = rest.get(..length) else { return Ok(None) };
        self.begins += LENGTH_BYTES + length;
        Ok(Some(frame))
    }
}

/// A frame with room for its length, which [`framed`] fills in.
fn frame(capacity: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(LENGTH_BYTES + capacity);
    bytes.extend([0; LENGTH_BYTES]);
    bytes
}

fn framed(mut bytes: Vec<u8>) -> Vec<u8> {
    // What is longer than any bound is refused by whoever reads it.
    let length = u32::try_from(bytes.len() - LENGTH_BYTES).unwrap_or(u32::MAX);
    if let Some(place) = bytes.first_chunk_mut::<LENGTH_BYTES>() {
        *place = length.to_le_bytes();
    }
    bytes
}

/// A request to `module`.
pub(crate) fn request(number: u64, module: u32, work: &Work) -> Vec<u8> {
    let (kind, texts, body) = match work {
        Work::Call { function, body } => (0_u8, std::slice::from_ref(function), body),
        Work::Run { args, stdin, as_json } => (1 + u8::from(*as_json), &args[..], stdin),
    };
    let mut bytes = frame(64 + body.len());
    bytes.extend(number.to_le_bytes());
    bytes.extend(module.to_le_bytes());
    bytes.push(kind);
    bytes.extend((texts.len() as u32).to_le_bytes());
    for text in texts {
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    bytes.extend(body);
    framed(bytes)
}

/// What [`request`] wrote: its number, the module, the work.
///
/// # Errors
/// [`Broken`].
pub(crate) fn read_request(mut frame: &[u8]) -> Result<(u64, u32, Work), Broken> {
    let (number, module) = (take_u64(&mut frame)?, take_u32(&mut frame)?);
    let [kind] = take(&mut frame)?;
    let count = take_u32(&mut frame)? as usize;
    let mut texts = Vec::new();
    for _ in 0..count {
        let length = take_u32(&mut frame)? as usize;
        let (text, rest) = frame.split_at_checked(length).ok_or(Broken)?;
        frame = rest;
        texts.push(String::from_utf8(text.to_vec()).map_err(|_| Broken)?);
    }
    let body = frame.to_vec();
    let work = match (kind, &mut texts[..]) {
        (0, [function]) => Work::Call { function: std::mem::take(function), body },
        (1 | 2, _) => Work::Run { args: texts, stdin: body, as_json: kind == 2 },
        _ => return Err(Broken),
    };
    Ok((number, module, work))
}

/// The answer to a request.
pub(crate) fn answer(number: u64, done: &Done) -> Vec<u8> {
    let Done { answer, spent } = done;
    let content = CONTENTS.iter().position(|kind| *kind == answer.kind).unwrap_or_default();
    let (ending, cpu_ns, preemptions) = match spent {
        None => (0, 0, 0),
        Some(Spent { ending, cpu_ns, preemptions }) => (*ending as u8, *cpu_ns, *preemptions),
    };
    let mut bytes = frame(28 + answer.body.len());
    bytes.extend(number.to_le_bytes());
    bytes.extend(answer.status.to_le_bytes());
    bytes.extend([content as u8, ending]);
    bytes.extend(cpu_ns.to_le_bytes());
    bytes.extend(preemptions.to_le_bytes());
    bytes.extend(&answer.body);
    framed(bytes)
}

/// What [`answer`] wrote: its number, and what was done.
///
/// # Errors
/// [`Broken`].
pub(crate) fn read_answer(mut frame: &[u8]) -> Result<(u64, Done), Broken> {
    let number = take_u64(&mut frame)?;
    let status = u16::from_le_bytes(take(&mut frame)?);
    let [content, ending] = take(&mut frame)?;
    let (cpu_ns, preemptions) = (take_u64(&mut frame)?, take_u64(&mut frame)?);
    // Others mean something else to HTTP: 204 and 304 have no body, and what follows their head
    // would be taken for the next answer (RFC 9112, 6.3).
    if !STATUSES.contains(&status) {
        return Err(Broken);
    }
    let kind = CONTENTS.get(usize::from(content)).ok_or(Broken)?;
    let spent = match ending {
        0 => None,
        code => {
            let ending = Ending::of(code).ok_or(Broken)?;
            Some(Spent { ending, cpu_ns, preemptions })
        }
    };
    Ok((number, Done { answer: Answer { status, kind, body: frame.to_vec() }, spent }))
}

/// What a worker may answer.
const STATUSES: [u16; 5] = [200, 400, 404, 429, 500];

/// What an answer may be, by number.
const CONTENTS: [&str; 2] = [Answer::JSON, Answer::OUTPUT];

fn take<const N: usize>(from: &mut &[u8]) -> Result<[u8; N], Broken> {
    let (first, rest) = from.split_first_chunk::<N>().ok_or(Broken)?;
    *from = rest;
    Ok(*first)
}

fn take_u32(from: &mut &[u8]) -> Result<u32, Broken> {
    take(from).map(u32::from_le_bytes)
}

fn take_u64(from: &mut &[u8]) -> Result<u64, Broken> {
    take(from).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after_length(frame: &[u8]) -> &[u8] {
        frame.split_at(LENGTH_BYTES).1
    }

    #[test]
    fn requests_and_answers_arrive_as_they_were() {
        let call = Work::Call { function: "f".to_owned(), body: b"[1]".to_vec() };
        let args = vec!["m".to_owned(), String::new(), "\u{e4}".to_owned()];
        let run = Work::Run { args, stdin: Vec::new(), as_json: true };
        for work in [call, run] {
            let frame = request(7, 9, &work);
            assert_eq!(read_request(after_length(&frame)), Ok((7, 9, work)));
        }
        let spent = Spent { ending: Ending::Trap, cpu_ns: 5, preemptions: 2 };
        let done = Done { answer: Answer::error(500, "no"), spent: Some(spent) };
        let (number, read) = read_answer(after_length(&answer(3, &done))).unwrap();
        assert_eq!((number, read.spent, read.answer.status), (3, Some(spent), 500));
        assert_eq!((read.answer.kind, &read.answer.body), (Answer::JSON, &done.answer.body));
    }

    #[test]
    fn what_is_cut_off_or_of_another_form_is_refused() {
        let work = Work::Call { function: "f".to_owned(), body: Vec::new() };
        let frame = request(7, 9, &work);
        for length in 0..after_length(&frame).len() {
            let cut = after_length(&frame).split_at(length).0;
            assert_eq!(read_request(cut), Err(Broken), "{length}");
        }
        let done = Done { answer: Answer::error(500, ""), spent: None };
        let good = answer(1, &done);
        let body = done.answer.body.len();
        for length in 0..after_length(&good).len() - body {
            assert!(read_answer(after_length(&good).split_at(length).0).is_err(), "{length}");
        }
        // A status, a content and an ending that there are not.
        for (at, byte) in [(9, 9), (10, 2), (11, 9)] {
            let mut bad = after_length(&good).to_vec();
            bad[at] = byte;
            assert!(read_answer(&bad).is_err(), "{at}");
        }
    }

    #[test]
    fn a_worker_answers_with_no_status_that_has_no_body() {
        for status in [0, 100, 101, 199, 204, 205, 206, 304, 502, 599] {
            let answer = Answer { status, kind: Answer::JSON, body: b"{}".to_vec() };
            let frame = super::answer(1, &answer.into());
            assert!(read_answer(after_length(&frame)).is_err(), "{status}");
        }
    }

    fn put(frames: &mut Frames, bytes: &[u8]) {
        frames.room()[..bytes.len()].copy_from_slice(bytes);
        frames.came(bytes.len());
    }

    #[test]
    fn frames_are_cut_where_they_end_and_bounded() {
        let work = Work::Call { function: "f".to_owned(), body: vec![0; 100] };
        let both = [request(1, 0, &work), request(2, 0, &work)].concat();
        let mut frames = Frames::default();
        let mut numbers = Vec::new();
        for piece in both.chunks(7) {
            put(&mut frames, piece);
            while let Some(frame) = frames.next(1000).unwrap() {
                numbers.push(read_request(frame).unwrap().0);
            }
        }
        assert_eq!(numbers, [1, 2]);
        put(&mut frames, &1001_u32.to_le_bytes());
        assert_eq!(frames.next(1000), Err(Broken));
    }
}
