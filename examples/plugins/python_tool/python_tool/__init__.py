"""A task whose model runs Python in a sandbox.

environment: {name: "python_tool.task:PythonTool", parameters: {sandbox: bubblewrap}}
"""
