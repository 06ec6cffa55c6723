//! The registers of a virtio device (virtio 1.3, section 4.2: virtio over MMIO).
//!
//! What the guest writes here is remembered until it says that its driver is ready; then the queues
//! go to the [`Backend`], and nothing here is on their way any more: doorbells and interrupts are
//! events between the guest's kernel and the back end.

use super::memory::DEVICE_BYTES;

/// What is behind the registers.
pub(super) trait Backend {
    /// The bits that it offers.
    fn features(&self) -> u64;
    /// Its configuration space.
    fn config(&self) -> &[u8];
    /// How many queues it has.
    fn queues(&self) -> usize;
    /// Begins to serve these queues, by their number.
    fn start(&mut self, features: u64, queues: &[(usize, Queue)]) -> Result<(), vhost::Error>;
    /// Ends that.
    fn stop(&mut self, queues: &[(usize, Queue)]) -> Result<(), vhost::Error>;
}

/// A queue as the guest has laid it out.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Queue {
    pub size: u16,
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
    ready: bool,
}

const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// `EXOC`: drivers do not look at it.
const VENDOR: u32 = 0x434f_5845;
/// Offsets of the registers.
mod at {
    pub const MAGIC: u64 = 0x000;
    pub const VERSION: u64 = 0x004;
    pub const DEVICE: u64 = 0x008;
    pub const VENDOR: u64 = 0x00c;
    pub const FEATURES: u64 = 0x010;
    pub const FEATURES_SELECT: u64 = 0x014;
    pub const DRIVER: u64 = 0x020;
    pub const DRIVER_SELECT: u64 = 0x024;
    pub const QUEUE_SELECT: u64 = 0x030;
    pub const QUEUE_SIZE_MAX: u64 = 0x034;
    pub const QUEUE_SIZE: u64 = 0x038;
    pub const QUEUE_READY: u64 = 0x044;
    pub const NOTIFY: u64 = 0x050;
    pub const INTERRUPT: u64 = 0x060;
    pub const STATUS: u64 = 0x070;
    pub const DESCRIPTORS: u64 = 0x080;
    pub const AVAILABLE: u64 = 0x090;
    pub const USED: u64 = 0x0a0;
    pub const SHARED_MEMORY: std::ops::Range<u64> = 0x0b0..0x0c0;
    pub const GENERATION: u64 = 0x0fc;
    pub const CONFIG: u64 = 0x100;
}
/// Where the guest rings for its queues.
pub(super) const NOTIFY: u64 = at::NOTIFY;
/// Bits of the status.
const FEATURES_OK: u32 = 8;
const DRIVER_OK: u32 = 4;
const NEEDS_RESET: u32 = 64;
const VERSION_1: u64 = 1 << 32;
/// There are used buffers. The back end interrupts past these registers, so that this is said
/// whenever it is asked; the driver then looks itself.
const USED_BUFFERS: u32 = 1;

/// A device's registers.
pub(super) struct Registers<B> {
    pub backend: B,
    id: u32,
    queue_size_max: u16,
    features_select: u32,
    driver_select: u32,
    driver: u64,
    queue_select: u32,
    queues: Vec<Queue>,
    status: u32,
}

impl<B: Backend> Registers<B> {
    pub fn new(backend: B, id: u32, queue_size_max: u16) -> Self {
        let queues = vec![Queue::default(); backend.queues()];
        Self {
            backend,
            id,
            queue_size_max,
            features_select: 0,
            driver_select: 0,
            driver: 0,
            queue_select: 0,
            queues,
            status: 0,
        }
    }

    /// Reads at `offset` bytes. What is no register reads as zeros.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        into.fill(0);
        if (at::CONFIG..DEVICE_BYTES).contains(&offset) {
            let from = usize::try_from(offset - at::CONFIG).unwrap_or(usize::MAX);
            let config = self.backend.config().get(from..).unwrap_or_default();
            into.iter_mut().zip(config).for_each(|(to, from)| *to = *from);
        } else if into.len() == 4 {
            into.copy_from_slice(&self.register(offset).to_le_bytes());
        }
    }

    fn register(&self, offset: u64) -> u32 {
        let queue = self.queues.get(self.queue_select as usize);
        match offset {
            at::MAGIC => MAGIC,
            at::VERSION => VERSION,
            at::DEVICE => self.id,
            at::VENDOR => VENDOR,
            at::FEATURES => half(self.backend.features(), self.features_select),
            at::QUEUE_SIZE_MAX => queue.map_or(0, |_| self.queue_size_max.into()),
            at::QUEUE_READY => queue.is_some_and(|queue| queue.ready).into(),
            at::INTERRUPT => USED_BUFFERS,
            at::STATUS => self.status,
            // There is no such memory.
            offset if at::SHARED_MEMORY.contains(&offset) => u32::MAX,
            // The configuration never changes.
            at::GENERATION => 0,
            _ => 0,
        }
    }

    /// Writes at `offset` bytes. What is no register, or not to be written now, is ignored.
    pub fn write(&mut self, offset: u64, from: &[u8]) {
        let Ok(bytes) = from.try_into() else { return };
        let value = u32::from_le_bytes(bytes);
        let negotiates = self.status & FEATURES_OK == 0;
        match offset {
            at::FEATURES_SELECT => self.features_select = value,
            at::DRIVER_SELECT => self.driver_select = value,
            at::DRIVER if negotiates => set_half(&mut self.driver, self.driver_select, value),
            at::QUEUE_SELECT => self.queue_select = value,
            at::STATUS => self.set_status(value),
            _ => self.set_queue(offset, value),
        }
    }

    fn set_queue(&mut self, offset: u64, value: u32) {
        let is_live = self.status & DRIVER_OK != 0;
        let Some(queue) = self.queues.get_mut(self.queue_select as usize) else { return };
        if is_live {
            return;
        }
        let (base, which) = (offset & !0xf, u32::from(offset & 4 != 0));
        match offset {
            at::QUEUE_READY => queue.ready = value == 1,
            at::QUEUE_SIZE => {
                queue.size = u16::try_from(value).unwrap_or(0).min(self.queue_size_max)
            }
            _ if offset & 0xf > 4 => {}
            _ => match base {
                at::DESCRIPTORS => set_half(&mut queue.descriptors, which, value),
                at::AVAILABLE => set_half(&mut queue.available, which, value),
                at::USED => set_half(&mut queue.used, which, value),
                _ => {}
            },
        }
    }

    fn set_status(&mut self, value: u32) {
        if value == 0 {
            return self.reset();
        }
        let mut set = value & !self.status;
        if set & FEATURES_OK != 0 && !self.is_agreed() {
            set &= !FEATURES_OK;
        }
        self.status |= set & !DRIVER_OK;
        if set & DRIVER_OK != 0 && self.status & FEATURES_OK != 0 {
            let queues = self.ready();
            match self.backend.start(self.driver, &queues) {
                Ok(()) => self.status |= DRIVER_OK,
                Err(_) => self.status |= NEEDS_RESET,
            }
        }
    }

    fn is_agreed(&self) -> bool {
        self.driver & !self.backend.features() == 0 && self.driver & VERSION_1 != 0
    }

    fn ready(&self) -> Vec<(usize, Queue)> {
        self.queues.iter().copied().enumerate().filter(|(_, queue)| queue.ready).collect()
    }

    fn reset(&mut self) {
        let stopped = match self.status & DRIVER_OK {
            0 => Ok(()),
            _ => self.backend.stop(&self.ready()),
        };
        self.queues.fill(Queue::default());
        (self.driver, self.status) = (0, 0);
        // A back end that is gone serves nothing; the driver sees that the reset never ends.
        if stopped.is_err() {
            self.status = NEEDS_RESET;
        }
    }
}

fn half(value: u64, which: u32) -> u32 {
    match which {
        0 => value as u32,
        1 => (value >> 32) as u32,
        _ => 0,
    }
}

fn set_half(value: &mut u64, which: u32, half: u32) {
    match which {
        0 => *value = *value & !0xffff_ffff | u64::from(half),
        1 => *value = *value & 0xffff_ffff | u64::from(half) << 32,
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes what it is told.
    #[derive(Default)]
    struct Noted {
        started: Vec<(u64, Vec<(usize, Queue)>)>,
        stopped: usize,
        refuses: bool,
        /// Started, and not stopped since.
        serves: bool,
    }

    impl Backend for Noted {
        fn features(&self) -> u64 {
            VERSION_1 | 0b101
        }

        fn config(&self) -> &[u8] {
            &[1, 2, 3]
        }

        fn queues(&self) -> usize {
            2
        }

        fn start(&mut self, features: u64, queues: &[(usize, Queue)]) -> Result<(), vhost::Error> {
            assert!(!self.serves, "started twice");
            self.started.push((features, queues.to_vec()));
            self.serves = !self.refuses;
            if self.refuses { Err(vhost::Error::InvalidOperation) } else { Ok(()) }
        }

        fn stop(&mut self, _: &[(usize, Queue)]) -> Result<(), vhost::Error> {
            assert!(self.serves, "stopped, and did not serve");
            (self.stopped, self.serves) = (self.stopped + 1, false);
            Ok(())
        }
    }

    fn registers() -> Registers<Noted> {
        Registers::new(Noted::default(), 2, 256)
    }

    fn read(registers: &Registers<Noted>, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        registers.read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn write(registers: &mut Registers<Noted>, offset: u64, value: u32) {
        registers.write(offset, &value.to_le_bytes());
    }

    /// As a driver does it (virtio 1.3, 3.1.1), with queue 1 alone.
    fn drive(registers: &mut Registers<Noted>, features: u64) {
        for (offset, value) in [
            (at::STATUS, 0),
            (at::STATUS, 3),
            (at::DRIVER_SELECT, 0),
            (at::DRIVER, features as u32),
            (at::DRIVER_SELECT, 1),
            (at::DRIVER, (features >> 32) as u32),
            (at::STATUS, 3 | FEATURES_OK),
            (at::QUEUE_SELECT, 1),
            (at::QUEUE_SIZE, 64),
            (at::DESCRIPTORS, 0x1000),
            (at::AVAILABLE, 0x2000),
            (at::AVAILABLE + 4, 1),
            (at::USED, 0x3000),
            (at::QUEUE_READY, 1),
            (at::STATUS, 3 | FEATURES_OK | DRIVER_OK),
        ] {
            write(registers, offset, value);
        }
    }

    #[test]
    fn a_driver_finds_the_device_and_its_queues_are_started_once_and_stopped() {
        let mut registers = registers();
        assert_eq!([0, 4, 8].map(|at| read(&registers, at)), [MAGIC, VERSION, 2]);
        drive(&mut registers, VERSION_1 | 1);
        let queue = Queue {
            size: 64,
            descriptors: 0x1000,
            available: 0x1_0000_2000,
            used: 0x3000,
            ready: true,
        };
        assert_eq!(registers.backend.started, [(VERSION_1 | 1, vec![(1, queue)])]);
        assert_eq!(read(&registers, at::STATUS), 3 | FEATURES_OK | DRIVER_OK);
        // A queue that is served stays as it is.
        write(&mut registers, at::DESCRIPTORS, 0x9000);
        write(&mut registers, at::STATUS, 0);
        assert_eq!((registers.backend.stopped, read(&registers, at::STATUS)), (1, 0));
        assert_eq!(read(&registers, at::QUEUE_READY), 0);
        drive(&mut registers, VERSION_1);
        assert_eq!(registers.backend.started.len(), 2);
    }

    #[test]
    fn features_that_were_not_offered_are_not_agreed() {
        for wrong in [1, VERSION_1 | 2] {
            let mut registers = registers();
            drive(&mut registers, wrong);
            assert_eq!(read(&registers, at::STATUS), 3);
            assert!(registers.backend.started.is_empty());
        }
    }

    #[test]
    fn a_back_end_that_refuses_has_the_driver_reset() {
        let mut registers = registers();
        registers.backend.refuses = true;
        drive(&mut registers, VERSION_1);
        assert_eq!(read(&registers, at::STATUS), 3 | FEATURES_OK | NEEDS_RESET);
    }

    /// A guest that keeps to no order: the back end is told of nothing that was not offered, and
    /// never twice.
    #[test]
    fn whatever_a_guest_writes_the_back_end_gets_what_it_offered() {
        // An xorshift generator; each run is the same.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let mut registers = registers();
        // What starts a device, and all around it.
        let places = [
            at::FEATURES_SELECT,
            at::DRIVER,
            at::DRIVER_SELECT,
            at::QUEUE_SELECT,
            at::QUEUE_SIZE,
            at::QUEUE_READY,
            at::STATUS,
            at::DESCRIPTORS,
            at::AVAILABLE + 4,
            at::USED,
        ];
        let done = 3 | FEATURES_OK | DRIVER_OK;
        let values = [0, 1, 1, 2, 3, 5, 64, 256, 3 | FEATURES_OK, done, done, 0xffff, u32::MAX];
        for step in 0..200_000 {
            registers.backend.refuses = random() % 7 == 0;
            let (place, value) = (random() as usize % places.len(), random() as usize);
            let noise = if random() % 8 == 0 { random() as u32 & 0xf } else { 0 };
            let value = values[value % values.len()] | noise;
            write(&mut registers, places[place], value);
            if step % 16 == 0 {
                let bytes = random().to_le_bytes();
                let length = random() as usize % 9;
                registers.write(random() % (2 * DEVICE_BYTES), &bytes[..length]);
                let mut read = [0; 8];
                registers.read(random(), &mut read[..length]);
            }
            // One in order now and then, or little would ever be started.
            if step % 1000 == 0 {
                registers.backend.refuses = false;
                drive(&mut registers, VERSION_1);
            }
        }
        let backend = &registers.backend;
        assert!(backend.started.len() > 200 && backend.stopped > 100, "{}", backend.stopped);
        for (features, queues) in &backend.started {
            assert_eq!(features & !backend.features(), 0);
            assert_ne!(features & VERSION_1, 0);
            for (index, queue) in queues {
                assert!(*index < backend.queues() && queue.size <= 256 && queue.ready);
            }
        }
    }

    #[test]
    fn nothing_is_where_nothing_is() {
        let mut registers = registers();
        write(&mut registers, at::QUEUE_SELECT, 2);
        write(&mut registers, at::QUEUE_READY, 1);
        assert_eq!(read(&registers, at::QUEUE_SIZE_MAX), 0);
        assert_eq!(read(&registers, 0xb0), u32::MAX, "no shared memory");
        let mut byte = [9];
        registers.read(at::CONFIG + 2, &mut byte);
        assert_eq!(byte, [3]);
        registers.read(at::CONFIG + 3, &mut byte);
        assert_eq!(byte, [0]);
        registers.read(at::MAGIC, &mut byte);
        assert_eq!(byte, [0], "registers have 4 bytes");
        registers.write(at::STATUS, &[1]);
        assert_eq!(read(&registers, at::STATUS), 0);
    }
}
