//! Tests of the devices with hand-made virtqueues.
