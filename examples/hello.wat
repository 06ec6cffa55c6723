;; Prints one line. Its only import is granted by [stdio] in demo-isolate.toml.
(module
  (import "wasi_snapshot_preview1" "fd_write"
    (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (memory (export "memory") 1)
  ;; One buffer at 0: address 16, 39 bytes.
  (data (i32.const 0) "\10\00\00\00\27\00\00\00")
  (data (i32.const 16) "Hello from an isolate: Wasm, no kernel\0a")
  (func (export "_start")
    (drop (call $fd_write (i32.const 1) (i32.const 0) (i32.const 1) (i32.const 8)))))
