//! Clients' first messages of TLS, and lies about whom they are for.

use super::mutants::Mutants;

const SERVER_NAME: u16 = 0;
const OTHER_RECORDS: [&[u8]; 5] = [
    b"\x15\x03\x01\x00\x02\x01\x5a",
    b"\x15\x03\x03\x00\x02\x01\x70",
    b"\x14\x03\x03\x00\x01\x01",
    b"\x17\x03\x03\x00\x01x",
    b"\r\n",
];
const NAMES: [&[u8]; 12] = [
    b"granted.test",
    b"other.test",
    b"GRANTED.test",
    b"granted.test.",
    b"granted.test\0",
    b"other.test\0granted.test",
    b"granted.test\0other.test",
    b"granted.test other.test",
    b"[::1]",
    b"",
    b"*.test",
    b".granted.test",
];

/// A hello in its parts.
#[derive(Clone)]
pub struct Hello {
    /// All before the extensions.
    front: Vec<u8>,
    extensions: Vec<(u16, Vec<u8>)>,
}

fn long(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat()
}

fn list(names: &[(u8, &[u8])]) -> Vec<u8> {
    let one = |(kind, name): &(u8, &[u8])| [vec![*kind], long(name)].concat();
    long(&names.iter().flat_map(one).collect::<Vec<u8>>())
}

impl Hello {
    /// Takes the one record of an honest client apart.
    pub fn read(record: &[u8]) -> Self {
        let u16_at = |at: usize| usize::from(u16::from_be_bytes([record[at], record[at + 1]]));
        // After the heads of record and message: version, random, session, suites, compressions.
        let session = 5 + 4 + 2 + 32;
        let suites = session + 1 + usize::from(record[session]);
        let compressions = suites + 2 + u16_at(suites);
        let start = compressions + 1 + usize::from(record[compressions]);
        let (mut at, mut extensions) = (start + 2, Vec::new());
        while at < record.len() {
            let (kind, length) = (u16_at(at) as u16, u16_at(at + 2));
            extensions.push((kind, record[at + 4..at + 4 + length].to_vec()));
            at += 4 + length;
        }
        Self { front: record[9..start].to_vec(), extensions }
    }

    fn message(&self) -> Vec<u8> {
        let one = |(kind, body): &(u16, Vec<u8>)| [&kind.to_be_bytes()[..], &long(body)].concat();
        let extensions = long(&self.extensions.iter().flat_map(one).collect::<Vec<u8>>());
        let body = [self.front.clone(), extensions].concat();
        [&[1][..], &(body.len() as u32).to_be_bytes()[1..], &body].concat()
    }

    fn name(&mut self, body: Vec<u8>) {
        self.extensions.retain(|(kind, _)| *kind != SERVER_NAME);
        self.extensions.insert(0, (SERVER_NAME, body));
    }

    /// A lie about its name, or the truth.
    fn lie(&mut self, by: &mut Mutants) {
        let mut one = || NAMES[by.below(NAMES.len())];
        let (first, second) = (one(), one());
        match by.below(10) {
            0..=2 => self.name(list(&[(0, first)])),
            3 => self.name(list(&[(0, first), (0, second)])),
            4 => self.name(list(&[(1, first), (0, second)])),
            5 => self.name(list(&[(0, first), (1, second)])),
            6 => self.name([list(&[(0, first)]), list(&[(0, second)])].concat()),
            7 => self.extensions.push((SERVER_NAME, list(&[(0, first)]))),
            8 => self.extensions.retain(|(kind, _)| *kind != SERVER_NAME),
            _ => {}
        }
    }
}

/// What a client of one of these says first, more or less.
pub fn mutant(hellos: &[Hello], by: &mut Mutants) -> Vec<u8> {
    let mut hello = hellos[by.below(hellos.len())].clone();
    hello.lie(by);
    let mut message = hello.message();
    if by.below(8) == 0 {
        let second = hellos[by.below(hellos.len())].message();
        message.extend(second);
    }
    if by.below(4) == 0 {
        let at = by.below(message.len());
        message[at] = by.below(256) as u8;
    }
    let most = if by.below(2) == 0 { 1 << 14 } else { 1 + by.below(300) };
    let mut said: Vec<Vec<u8>> = message
        .chunks(most)
        .map(|part| [&[22, 3, [1, 1, 3, 2][by.below(4)]][..], &long(part)].concat())
        .collect();
    if by.below(8) == 0 {
        let at = by.below(said.len() + 1);
        said.insert(at, OTHER_RECORDS[by.below(OTHER_RECORDS.len())].to_vec());
    }
    if by.below(8) == 0 {
        let at = by.below(said.len());
        let byte = by.below(said[at].len().min(5));
        said[at][byte] = by.below(256) as u8;
    }
    said.concat()
}
