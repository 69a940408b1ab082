"""Low precision where a device lacks it or is slow at it: decided here, computed in fp32."""
