//! What a processor reaches outside of its memory: devices, the port of first words, and the port
//! by which a PC is started again.

use std::io::Write;
use std::sync::{Mutex, PoisonError};

use super::frontend::Served;
use super::memory::{DEVICE_BYTES, DEVICES};
use super::mmio::{Backend, Registers};

/// A serial port (16550) of which there is only the sender: the kernel's first words, until it has
/// its console.
const SERIAL: std::ops::Range<u16> = 0x3f8..0x400;
const SERIAL_STATUS: u16 = 0x3fd;
/// It has sent all.
const SENT: u8 = 0x60;
/// The keyboard's controller, whose command `0xfe` starts a PC again.
const KEYBOARD: u16 = 0x64;
const START_AGAIN: u8 = 0xfe;

/// What a write asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Nothing,
    /// The machine's end.
    End,
}

/// All that is outside, for all processors.
pub(super) struct Bus<B = Served> {
    devices: Vec<Mutex<Registers<B>>>,
}

impl<B: Backend> Bus<B> {
    pub fn new(devices: Vec<Registers<B>>) -> Self {
        Self { devices: devices.into_iter().map(Mutex::new).collect() }
    }

    fn device(&self, address: u64) -> Option<(&Mutex<Registers<B>>, u64)> {
        let offset = address.checked_sub(DEVICES)?;
        let number = usize::try_from(offset / DEVICE_BYTES).ok()?;
        Some((self.devices.get(number)?, offset % DEVICE_BYTES))
    }

    pub fn read(&self, address: u64, into: &mut [u8]) {
        match self.device(address) {
            Some((device, offset)) => {
                device.lock().unwrap_or_else(PoisonError::into_inner).read(offset, into);
            }
            None => into.fill(0xff),
        }
    }

    pub fn write(&self, address: u64, from: &[u8]) {
        if let Some((device, offset)) = self.device(address) {
            device.lock().unwrap_or_else(PoisonError::into_inner).write(offset, from);
        }
    }
}

pub(super) fn read_port(port: u16, into: &mut [u8]) {
    into.fill(match port {
        SERIAL_STATUS => SENT,
        port if SERIAL.contains(&port) => 0,
        // It is ready for commands.
        KEYBOARD => 0,
        _ => 0xff,
    });
}

/// Words go to `console`.
pub(super) fn write_port(port: u16, from: &[u8], mut console: impl Write) -> Asked {
    match (port, from) {
        (KEYBOARD, [START_AGAIN]) => return Asked::End,
        // Words that nobody takes are lost.
        (port, bytes) if port == SERIAL.start => drop(console.write_all(bytes)),
        _ => {}
    }
    Asked::Nothing
}

#[cfg(test)]
mod tests {
    use super::super::mmio::Queue;
    use super::*;

    struct Nothing;

    impl Backend for Nothing {
        fn features(&self) -> u64 {
            0
        }

        fn config(&self) -> &[u8] {
            &[7]
        }

        fn queues(&self) -> usize {
            1
        }

        fn start(&mut self, _: u64, _: &[(usize, Queue)]) -> Result<(), vhost::Error> {
            Ok(())
        }

        fn stop(&mut self, _: &[(usize, Queue)]) -> Result<(), vhost::Error> {
            Ok(())
        }
    }

    #[test]
    fn a_device_is_in_its_page_and_nothing_is_beside_the_devices() {
        let device = |id| Registers::new(Nothing, id, 8);
        let bus = Bus::new(vec![device(2), device(4)]);
        let read = |address| {
            let mut bytes = [0; 4];
            bus.read(address, &mut bytes);
            u32::from_le_bytes(bytes)
        };
        let second = DEVICES + DEVICE_BYTES;
        assert_eq!([DEVICES + 8, second + 8].map(read), [2, 4]);
        assert_eq!(read(second + DEVICE_BYTES - 4), 0, "its configuration has ended");
        for nowhere in [0, DEVICES - 4, second + DEVICE_BYTES, u64::MAX] {
            assert_eq!(read(nowhere), u32::MAX);
            bus.write(nowhere, &[1, 2, 3, 4, 5, 6, 7, 8]);
        }
        // Any number of bytes, anywhere in a page.
        for length in 0..=8 {
            bus.write(second + 0xfff, &[0xff; 8][..length]);
            bus.read(second + 0xfff, &mut [0; 8][..length]);
        }
    }

    #[test]
    fn words_are_written_and_the_end_is_heard() {
        let mut said = Vec::new();
        assert_eq!(write_port(0x3f8, b"a", &mut said), Asked::Nothing);
        assert_eq!(write_port(0x3f9, b"b", &mut said), Asked::Nothing);
        assert_eq!(write_port(0x64, &[0xff], &mut said), Asked::Nothing);
        assert_eq!(write_port(0x64, &[0xfe], &mut said), Asked::End);
        assert_eq!(said, b"a");
        let mut byte = [0];
        read_port(0x3fd, &mut byte);
        assert_eq!(byte, [0x60]);
        read_port(0x1234, &mut byte);
        assert_eq!(byte, [0xff]);
    }
}
